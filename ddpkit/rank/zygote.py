"""The process that warm jobs are forked from: imports torch once, never touches CUDA, keeps one thread, and forks on request.

`ddpkit/zygote.py` starts one per kernel as `python -u zygote.py LISTENING_FD OWNER_PID FOLDER`. For each request it forks
a keeper, and the keeper forks the agent or the rank: the same program (`keeper.py`) over the same processes as in a cold
job, so that a zygote that dies takes no running job along. What is forked first takes on everything that it would have
had if it had been started: environment, working directory, limits, paths, seeds, and what /proc says of it.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import contextlib
import ctypes
import gc
import importlib
import math
import multiprocessing.process
import resource
import select
import shutil
import site
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ddpkit import keeper, wire
from ddpkit.client import PATIENCE_S, READY, Connection
from ddpkit.rank import bootstrap, observe

# Chosen by measurement (docs/launch.md): what torchrun's agent and every rank import, and then, while nobody asks
# for anything, what an ordinary DDP script imports on its way. DDP's constructor alone imports torch._dynamo, a second.
NEEDED_BY_ALL = (
    "torch",
    "torch.distributed.run",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.utils.checkpoint",
    "torch.profiler",
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
    "cloudpickle",
)
NEEDED_BY_MANY = ("sympy", "torch.fx.experimental.symbolic_shapes", "torch._dynamo")
# Read when a process, Python, torch or one of its libraries starts: too late for them in a fork.
READ_AT_START = (
    *("LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "PYTHON", "TORCH", "PYTORCH", "ATEN_", "KINETO_", "NPY_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_"),
)
# Of these, what is read later after all, and what is made good between the fork and the script (`_be_torch_of`).
READ_LATER = (
    *("TORCHELASTIC_", "TORCH_ELASTIC_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_DIST_", "TORCH_HOME"),
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "PYTHON_EXEC", "PYTHONPATH", "PYTHONUNBUFFERED"),
)
MADE_GOOD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG")
TICK_S = 0.5
QUIET_S = 2.0


class Zygote:
    """Serves one kernel until that has gone, or until nobody has asked for anything for `idle_s` seconds."""

    def __init__(self, owner: int, idle_s: float) -> None:
        self.owner = keeper.Owner(owner)
        self.idle_s = idle_s
        self.env = dict(os.environ)
        self.folders = _import_folders(self.env)
        self.base_path = [p for p in sys.path[1:] if p not in self.folders]
        self.packages = _changed_ns()
        self.keepers: set[int] = set()
        self.began, self.asked = time.monotonic(), -math.inf

    def serve(self, listener: socket.socket) -> None:
        """Answer one request after the other; returns when there is no more reason to be there."""
        later, stale = list(NEEDED_BY_MANY), False
        self.began = time.monotonic()
        while not (stale or self.owner.gone() or self._idle()):
            # The ranks of a job ask a moment after their agent: an import in between would hold them up.
            importing = later and time.monotonic() - self.asked > QUIET_S
            if select.select([listener], [], [], 0 if importing else TICK_S)[0]:
                stale = self._meet(listener)
            elif importing:
                preload(later.pop(0))
                if not later:
                    be_fit_to_fork()

    def _meet(self, listener: socket.socket) -> bool:
        """Take the next one who waits, and answer; whether this zygote is out of date."""
        accepted = listener.accept()[0]
        accepted.settimeout(PATIENCE_S)
        connection = Connection(accepted)
        try:
            return self._answer(connection, listener)
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            # Whoever asked has gone, or speaks another language. There is nobody to tell.
            return False
        finally:
            connection.close()

    def _idle(self) -> bool:
        while self.keepers:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                self.asked = time.monotonic()
                break
            self.keepers.discard(pid)
        return time.monotonic() - max(self.asked, self.began) > self.idle_s

    def _answer(self, connection: Connection, listener: socket.socket) -> bool:
        """Fork what is asked for, or decline; whether this zygote is out of date."""
        if connection.peer()[1] != os.geteuid():
            return False
        connection.socket.send(READY)
        request, fds = connection.receive(most_fds=3)
        self.asked = time.monotonic()
        try:
            # A rank goes with its agent: both have the same environment, but for what torchrun adds.
            why, stale = self._why_not(request) if request["what"] == "agent" else ("", False)
            if why:
                connection.send((why, stale))
                return stale
            pid = os.fork()
            if pid == 0:
                listener.close()
                _keep(connection, request, fds, self.base_path)
            self.keepers.add(pid)
            return False
        finally:
            # In the forked process, on its way out of here, they are closed already.
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _why_not(self, request: Mapping[str, Any]) -> tuple[str, bool]:
        """Why the job of `request` is not forked here, "" where it is; and whether a new zygote would fork it."""
        if self.packages != _changed_ns():
            return "packages were installed or removed since the warm process started", True
        return self._what_would_differ(request), False

    def _what_would_differ(self, request: Mapping[str, Any]) -> str:
        """Why the job of `request` would not be the same if it were forked here; "" where it would be."""
        env = request["env"]
        for name in sorted({*env, *self.env}):
            if _too_late(name) and name not in MADE_GOOD and env.get(name) != self.env.get(name):
                return f"{name} is read when Python and torch start"
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            if not env.get(name, "1").isdigit():
                return f"{name}={env[name]} is read when torch starts"
        for name in filter(_too_late, request["variables"]):
            return f"the program names {name}, which is read when torch is imported"
        folders = _import_folders(env)
        if not set(self.folders) <= set(folders):
            return "PYTHONPATH lacks a folder that the warm process may have imported from"
        return self._shadowed([*request["folders"], *(f for f in folders if f not in self.folders)])

    def _shadowed(self, folders: Sequence[str]) -> str:
        """Which file in `folders` would be imported in place of a module that is loaded already."""
        loaded = {name.partition(".")[0] for name in (*sys.modules, *NEEDED_BY_MANY)}
        loaded -= {"__main__", "ddpkit", *sys.builtin_module_names}
        for folder in folders:
            for name in sorted((loaded | {"sitecustomize", "usercustomize"}) & _modules_in(folder)):
                return f"{folder} has a module {name}, which would take the place of one that is loaded already"
        return ""


def _too_late(name: str) -> bool:
    """Whether a process that has imported torch has read the variable `name` already."""
    return name.startswith(READ_AT_START) and not name.startswith(READ_LATER)


def _modules_in(folder: str) -> set[str]:
    """The names that `import` would find in `folder`."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return set()
    files = {e.name.partition(".")[0] for e in entries if e.name.endswith((".py", ".so", ".pyc", ".zip"))}
    return files | {e.name for e in entries if e.is_dir() and os.path.exists(os.path.join(e.path, "__init__.py"))}


def _import_folders(env: Mapping[str, str]) -> list[str]:
    """PYTHONPATH as Python puts it into `sys.path`."""
    entries = env.get("PYTHONPATH", "")
    return list(dict.fromkeys(os.path.abspath(e) for e in entries.split(os.pathsep))) if entries else []


def _changed_ns() -> dict[str, int]:
    """When something was last installed into, or removed from, each folder of packages."""
    found = {}
    for folder in (*site.getsitepackages(), site.getusersitepackages()):
        if os.path.isdir(folder):
            found[folder] = os.stat(folder).st_mtime_ns
    return found


def preload(*names: str) -> None:
    """Import modules `names`; one that this version of torch does not have is left out."""
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


def be_fit_to_fork() -> None:
    """Leave this process fit to be forked: one thread, no GPU touched, and nothing remembered that a rank would miss.

    Raises:
        RuntimeError: it is not fit.
    """
    _forget_warnings()
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"importing torch left {len(threads)} threads, and a fork would have lost all but one")
    if any(os.path.realpath(f"/proc/self/fd/{fd}").startswith("/dev/nvidia") for fd in os.listdir("/proc/self/fd")):
        raise RuntimeError("importing torch opened a GPU, which no fork can use after that")


def _forget_warnings() -> None:
    """A warning is shown once per place; what was shown here has not been shown to any rank."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            module.__dict__.pop("__warningregistry__", None)
    warnings.onceregistry.clear()  # type: ignore[attr-defined]


# From here on, in a forked process.


def _keep(connection: Connection, request: dict[str, Any], fds: list[int], base_path: list[str]) -> NoReturn:
    """Be the keeper of the agent or rank that `request` asks for, and tell its end over `connection`."""
    try:
        try:
            _take_on(request, fds, connection)
        except OSError as error:
            connection.send((f"a forked process cannot have the limits of this one ({error})", False))
            os._exit(1)
        # Fails where whoever asked has gone meanwhile: then nobody wants this process.
        connection.send(os.getpid())
        owner, arguments = connection.peer()[0], request["arguments"]
        if request["what"] == "agent":
            status = keeper.keep_agent(lambda: _leave_for(_be_agent, arguments, base_path), owner)
        else:
            status = keeper.keep_rank(lambda: _leave_for(_be_rank, arguments, base_path), owner)
        connection.send(status)
        os._exit(0)
    except keeper.Forked:
        raise
    except BaseException as error:
        print(f"ddpkit: a warm process could not be kept: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _leave_for(
    being: Callable[[list[str], list[str]], NoReturn], arguments: list[str], base_path: list[str]
) -> NoReturn:
    """Be it outside of all of the zygote's frames, which nobody wants to see in a rank's stack."""
    raise keeper.Forked(lambda: being(arguments, base_path))


def _take_on(request: Mapping[str, Any], fds: Sequence[int], connection: Connection) -> None:
    """Take on what a process started by whoever asks would have inherited."""
    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    kept = connection.socket.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, 4096)
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    for number, limits in request["limits"].items():
        if resource.getrlimit(number) != limits:
            resource.setrlimit(number, limits)
    os.sched_setaffinity(0, request["cores"])
    os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    os.environ.clear()
    os.environ.update(request["env"])
    role = ["agent", str(connection.peer()[0])] if request["what"] == "agent" else ["rank"]
    show_as([sys.executable, "-I", "-S", keeper.__file__, *role, *request["arguments"]], request["env"])


def _be_agent(command: list[str], base_path: list[str]) -> NoReturn:
    """Run torchrun's own main, as `python -m torch.distributed.run ...` does."""
    arguments = command[command.index("-m") + 1 :]
    _be_fresh(command, [os.getcwd(), *_import_folders(os.environ), *base_path])
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


def _be_rank(arguments: list[str], base_path: list[str]) -> NoReturn:
    """Run the rank's script, as the bootstrap does in a cold rank."""
    command = keeper.rank_command(arguments)
    _be_fresh(command, [*_import_folders(os.environ), *base_path])
    _be_torch_of(os.environ)
    bootstrap.become(command[3:], warm=True)


def _be_fresh(command: list[str], path: list[str]) -> None:
    """What a Python just started as `command` would have: its own seeds, keys, caches and name; nobody else's sockets."""
    show_as(command, os.environ)
    os.closerange(3, 4096)
    sys.orig_argv = list(command)
    sys.path[:] = dict.fromkeys(path)
    sys.path_importer_cache.clear()
    tempfile.tempdir = None
    this = multiprocessing.process.current_process()
    this.authkey = os.urandom(32)
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    os.write(2, SAID_WHILE_LOADING)


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
        import threadpoolctl

        threadpoolctl.threadpool_limits(blas, user_api="blas")


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


def _check_mark() -> None:
    """The sweep after a job relies on the mark in /proc: see that a fork can carry it.

    Raises:
        RuntimeError: it cannot on this system.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0 if _carries_mark() else 1)
    if os.waitpid(pid, 0)[1] != 0:
        raise RuntimeError("this system does not let a forked process show its own environment in /proc")


def _carries_mark() -> bool:
    try:
        show_as(["test"], {wire.ENV_RUN: "test"})
        with open("/proc/self/environ", "rb") as environ:
            return environ.read().startswith(f"{wire.ENV_RUN}=test\0".encode())
    except (OSError, ValueError):
        return False


SAID_WHILE_LOADING = b""


def main(listening_fd: int, owner: int, folder: str) -> None:
    """Preload, serve, and leave nothing behind."""
    global SAID_WHILE_LOADING
    os.environ.pop(wire.ENV_ROOM, None)
    try:
        zygote = Zygote(owner, float(os.environ.get(wire.ENV_WARM_IDLE_S, wire.WARM_IDLE_S)))
        observe.arm()
        preload(*NEEDED_BY_ALL)
        be_fit_to_fork()
        _check_mark()
        SAID_WHILE_LOADING = Path(folder, wire.ZYGOTE_LOG).read_bytes()
        show_as([sys.executable, "-u", __file__, f"(warm start for process {owner})"], os.environ)
        zygote.serve(socket.socket(fileno=listening_fd))
    finally:
        if keeper.Owner(owner).gone():
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    become: Callable[[], NoReturn] | None = None
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    except keeper.Forked as forked:
        become = forked.become
    if become:
        become()
