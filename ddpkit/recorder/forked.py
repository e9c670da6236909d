"""What a process forked from the zygote takes on, so that it is what it would be if it had been started: keeper, agent or rank.

The keeper is forked from the zygote, and the agent or the rank from the keeper, which stays its parent: a zygote that dies
takes no running job along.
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
    """What the zygote hands down: where Python itself imports from, and what was said while torch was imported."""

    path: list[str]
    said: bytes


def keep(connection: Connection, request: dict[str, Any], fds: list[int], inheritance: Inheritance) -> NoReturn:
    """Be the keeper of the agent or rank that `request` asks for, and tell its end over `connection`."""
    try:
        try:
            _take_on(request, fds, connection)
        except OSError as error:
            connection.send((f"a forked process cannot have the limits of this one ({error})", False))
            os._exit(1)
        # Fails where whoever asked has gone meanwhile: then nobody wants this process.
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
    """Be it outside of all of the zygote's frames, which nobody wants to see in a rank's stack."""
    raise keeper.Forked(lambda: be(arguments, inheritance))


def _take_on(request: Mapping[str, Any], fds: Sequence[int], connection: Connection) -> None:
    """Take on what a process started by whoever asks would have inherited.

    Raises:
        OSError: a limit cannot be had, or whoever asks has gone.
    """
    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    kept = connection.socket.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, 4096)
    asking = connection.peer()[0]
    os.chdir(f"/proc/{asking}/cwd")
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
    """Run torchrun's own main, as `python -m torch.distributed.run ...` does."""
    arguments = command[command.index("-m") + 1 :]
    _be_fresh(command, [os.getcwd()], inheritance)
    _hurry_the_rendezvous()
    sys.argv = arguments
    bootstrap.leave(bootstrap.run(arguments[0], as_module=True))


def _hurry_the_rendezvous() -> None:
    """Spare an agent that has this host to itself what only many hosts need, and what only a small process can afford.

    The first is a random pause of up to 0.3 s, so that hosts do not all ask at once; later pauses, a number of seconds
    instead of a range, are kept. The second is `inspect.stack()`, which looks through every module that is loaded, 18
    times, for the names in log lines.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    pause = getattr(rendezvous, "_delay", time.sleep)
    if "--standalone" in sys.orig_argv:
        rendezvous._delay = lambda seconds: None if isinstance(seconds, tuple) else pause(seconds)
    rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def _be_rank(arguments: list[str], inheritance: Inheritance) -> NoReturn:
    """Run the rank's script, as the bootstrap does in a cold rank."""
    command = keeper.rank_command(arguments)
    _be_fresh(command, [], inheritance)
    # torchrun handles these, so that its ranks have them by default even where a shell has had them ignored.
    for number in keeper.FATAL:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _be_torch_of(os.environ)
    bootstrap.become(command[3:], warm=True)


def _be_fresh(command: list[str], first_folders: list[str], inheritance: Inheritance) -> None:
    """What a Python just started as `command` would have: its own seeds, keys, caches and name; nobody else's sockets."""
    show_as(command, os.environ)
    os.closerange(3, 4096)
    sys.orig_argv = list(command)
    sys.path[:] = dict.fromkeys([*first_folders, *import_folders(os.environ), *inheritance.path])
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
    """Have torch and numpy's BLAS look again at what they read from the environment when they were loaded."""
    import torch
    import torch.distributed as dist

    dist.set_debug_level_from_env()
    torch.default_generator.seed()
    threads, cores = env.get("OMP_NUM_THREADS"), len(os.sched_getaffinity(0))
    if threads:
        # As when torch is loaded: MKL never takes more threads than there are cores, OpenMP alone does.
        most = torch.get_num_threads() if torch.backends.mkl.is_available() else int(threads)
        torch.set_num_threads(min(int(threads), most))
    blas = min(int(env.get("OPENBLAS_NUM_THREADS") or threads or cores), cores)
    if blas > 1:
        _limit_blas(blas)


def _limit_blas(threads: int) -> None:
    """Have numpy's BLAS take so many threads."""
    before = set(os.environ)
    import threadpoolctl

    threadpoolctl.threadpool_limits(threads, user_api="blas")
    # A cold rank has neither the module nor the variable that loading it sets, until the program loads it itself.
    del sys.modules["threadpoolctl"]
    for name in set(os.environ) - before:
        del os.environ[name]


def import_folders(env: Mapping[str, str]) -> list[str]:
    """PYTHONPATH as Python puts it into `sys.path`."""
    entries = env.get("PYTHONPATH", "")
    return list(dict.fromkeys(os.path.abspath(e) for e in entries.split(os.pathsep))) if entries else []


def show_as(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Have /proc, and so `ps`, py-spy and the sweep for what a job left behind, tell this command line and environment.

    Linux reads both from where the process was given them at its start; the zygote was given room there. `env` is cut
    where it does not fit, the mark of the job comes first.
    """
    with open("/proc/self/stat", "rb") as stat:
        arguments, arguments_end, variables, variables_end = map(int, stat.read().rpartition(b")")[2].split()[45:49])
    title = b" ".join(os.fsencode(word) for word in command)
    # A last byte that is not zero tells Linux that this is a title: one string, up to the first zero.
    size = arguments_end - arguments
    ctypes.memmove(arguments, title[: size - 2].ljust(size - 1, b"\0") + b"\xff", size)
    marked = sorted(env.items(), key=lambda item: item[0] != wire.ENV_RUN)
    block = b"".join(os.fsencode(f"{name}={value}\0") for name, value in marked)
    size = variables_end - variables
    ctypes.memmove(variables, block[: size - 1].ljust(size, b"\0"), size)
