"""Makes a process forked from the zygote like a started keeper, agent or rank.

The keeper is forked from the zygote, and the agent or rank from the keeper: a zygote that dies ends no running job.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing.process
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ddpkit.processes import keeper
from ddpkit.processes.forked_client import Connection
from ddpkit.runfolder import wire

from . import bootstrap


@dataclass(frozen=True)
class Inheritance:
    """What the zygote passes on: Python's own import path, and what importing torch printed."""

    path: list[str]
    said: bytes


def keep(connection: Connection, request: dict[str, Any], fds: list[int], inheritance: Inheritance) -> NoReturn:
    """Be the keeper of the requested agent or rank, and send its end over `connection`."""
    try:
        try:
            _take_on(request, fds, connection)
        except OSError as error:
            connection.send((f"a forked process cannot have the limits of this one ({error})", False))
            os._exit(1)
        # Fails if the asking process is gone; then this process is not needed.
        connection.send(os.getpid())
        keep, be = (keeper.keep_agent, _be_agent) if request["what"] == "agent" else (keeper.keep_rank, _be_rank)
        status = keep(lambda: _leave_for(be, request["arguments"], inheritance), connection.peer()[0])
        connection.send(status)
        os._exit(0)
    except keeper.Forked:
        raise
    except BaseException as error:
        print(f"ddpkit: a warm process could not be kept: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _leave_for(
    be: Callable[[list[str], Inheritance], NoReturn], arguments: list[str], inheritance: Inheritance
) -> NoReturn:
    """Call `be` outside of the zygote's frames, which do not belong into a rank's stack."""
    raise keeper.Forked(lambda: be(arguments, inheritance))


def _take_on(request: Mapping[str, Any], fds: Sequence[int], connection: Connection) -> None:
    """Take on what a child of the asking process would have inherited.

    Raises:
        OSError: a limit cannot be set, or the asking process is gone.
    """
    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    kept = connection.socket.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, 4096)
    asking = connection.peer()[0]
    os.chdir(request.get("cwd") or f"/proc/{asking}/cwd")
    os.umask(_umask_of(asking))
    for number in {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}:
        limits = resource.prlimit(asking, number)
        if resource.getrlimit(number) != limits:
            resource.setrlimit(number, limits)
    os.sched_setaffinity(0, os.sched_getaffinity(asking))
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, asking))
    os.environ.clear()
    os.environ.update(request["env"])
    role = ["agent", str(asking)] if request["what"] == "agent" else ["rank"]
    show_as([sys.executable, "-I", "-S", keeper.__file__, *role, *request["arguments"]], request["env"])


def _umask_of(pid: int) -> int:
    with open(f"/proc/{pid}/status", "rb") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith(b"Umask:"))


def _be_agent(command: list[str], inheritance: Inheritance) -> NoReturn:
    """Run torchrun's own main, as `python -P -m torch.distributed.run ...` does."""
    arguments = command[command.index("-m") + 1 :]
    _be_fresh(command, inheritance)
    _hurry_the_rendezvous()
    sys.argv = arguments
    bootstrap.leave(bootstrap.run(arguments[0], as_module=True))


def _hurry_the_rendezvous() -> None:
    """Skip two slow steps of torchrun's rendezvous.

    One is a random pause of up to 0.3 s, so that many hosts do not ask at once; other pauses, given as a number of
    seconds, are kept. The other is `inspect.stack()`, which searches all loaded modules 18 times for names in log lines.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    pause = getattr(rendezvous, "_delay", time.sleep)
    if "--standalone" in sys.orig_argv:
        rendezvous._delay = lambda seconds: None if isinstance(seconds, tuple) else pause(seconds)
    rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def _be_rank(arguments: list[str], inheritance: Inheritance) -> NoReturn:
    """Run the rank's script, as in a cold rank."""
    command = keeper.rank_command(arguments)
    _be_fresh(command, inheritance)
    # torchrun handles these signals, so its ranks get the default even if a shell had them ignored.
    for number in keeper.FATAL:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _be_torch_of(os.environ)
    bootstrap.become(command[3:], warm=True)


def _be_fresh(command: list[str], inheritance: Inheritance) -> None:
    """Give this process what a new Python has: its own seeds, keys, caches and name, and no open sockets."""
    show_as(command, os.environ)
    os.closerange(3, 4096)
    sys.orig_argv = list(command)
    sys.path[:] = dict.fromkeys([*import_folders(os.environ), *inheritance.path])
    sys.path_importer_cache.clear()
    tempfile.tempdir = None
    this = multiprocessing.process.current_process()
    this.authkey = os.urandom(32)
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    os.write(2, inheritance.said)


def _be_torch_of(env: Mapping[str, str]) -> None:
    """Apply what torch and numpy's BLAS read from the environment when they are loaded."""
    import torch
    import torch.distributed as dist

    dist.set_debug_level_from_env()
    torch.default_generator.seed()
    threads, cores = env.get("OMP_NUM_THREADS"), len(os.sched_getaffinity(0))
    if threads:
        # As when torch is loaded: MKL never takes more threads than there are cores, OpenMP does.
        most = torch.get_num_threads() if torch.backends.mkl.is_available() else int(threads)
        torch.set_num_threads(min(int(threads), most))
    blas = min(int(env.get("OPENBLAS_NUM_THREADS") or threads or cores), cores)
    if blas > 1:
        _limit_blas(blas)


def _limit_blas(threads: int) -> None:
    """Set the number of threads of numpy's BLAS."""
    before = set(os.environ)
    import threadpoolctl

    threadpoolctl.threadpool_limits(threads, user_api="blas")
    # A cold rank has neither the module nor the variable that it sets, until the program imports it.
    del sys.modules["threadpoolctl"]
    for name in set(os.environ) - before:
        del os.environ[name]


def import_folders(env: Mapping[str, str]) -> list[str]:
    """The folders of PYTHONPATH, as Python puts them into `sys.path`."""
    entries = env.get("PYTHONPATH", "")
    return list(dict.fromkeys(os.path.abspath(e) for e in entries.split(os.pathsep))) if entries else []


def show_as(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Have /proc show this command line and environment, for `ps`, py-spy and the sweep.

    Linux reads both from the memory in which the process got them at its start; the zygote was given room there. `env`
    is cut if it does not fit; the job's mark comes first.
    """
    with open("/proc/self/stat", "rb") as stat:
        arguments, arguments_end, variables, variables_end = map(int, stat.read().rpartition(b")")[2].split()[45:49])
    title = b" ".join(os.fsencode(word) for word in command)
    # A last byte that is not zero tells Linux that this is a title: one string up to the first zero.
    size = arguments_end - arguments
    ctypes.memmove(arguments, title[: size - 2].ljust(size - 1, b"\0") + b"\xff", size)
    marked = sorted(env.items(), key=lambda item: item[0] != wire.ENV_RUN)
    block = b"".join(os.fsencode(f"{name}={value}\0") for name, value in marked)
    size = variables_end - variables
    ctypes.memmove(variables, block[: size - 1].ljust(size, b"\0"), size)
