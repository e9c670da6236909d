"""The process that warm jobs are forked from: imports torch once, never touches CUDA, keeps one thread, and forks on request.

`processes/zygote.py` starts one per kernel as `python -u zygote.py LISTENING_FD OWNER_PID FOLDER`. For each request it forks
a keeper, and the keeper forks the agent or the rank: the same program, `processes/keeper.py`, over the same processes as
in a cold job. What a fork makes of itself is in `forked.py`; this file preloads, and judges whether a fork would be the same job.
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
import select
import shutil
import site
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ddpkit.processes import keeper
from ddpkit.processes.forked_client import PATIENCE_S, READY, Connection
from ddpkit.recorder import watched_calls
from ddpkit.recorder.forked import Inheritance, import_folders, keep, show_as
from ddpkit.runfolder import wire

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
    # torch sets it by itself, in a kernel that takes a step of an optimizer, and reads it when it compiles.
    "TORCHINDUCTOR_CACHE_DIR",
)
MADE_GOOD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG")
MADV_DONTNEED = 4
TICK_S = 0.5
QUIET_S = 0.4


class Zygote:
    """Serves one kernel until that has gone, or until nobody has asked for anything for `idle_s` seconds."""

    def __init__(self, owner: int, idle_s: float) -> None:
        self.owner = keeper.Owner(owner)
        self.idle_s = idle_s
        self.env = dict(os.environ)
        self.folders = import_folders(self.env)
        self.path = [p for p in sys.path[1:] if p not in self.folders]
        self.packages = _changed_ns()
        self.said = b""
        self.keepers: set[int] = set()
        # When it began, was last asked for something, and last had a job that ran.
        self.began, self.asked, self.at_work = time.monotonic(), -math.inf, -math.inf

    def serve(self, listener: socket.socket) -> None:
        """Answer one request after the other; returns when there is no more reason to be there."""
        later, stale = list(NEEDED_BY_MANY), False
        self.began = time.monotonic()
        while not (stale or self.owner.gone() or self._idle()):
            # The ranks of a job ask a moment after their agent: an import in between would hold them up. Once they run it
            # does not; where one job followed the other all ranks would import for themselves what could be there.
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
                self.at_work = time.monotonic()
                break
            self.keepers.discard(pid)
        return time.monotonic() - max(self.began, self.asked, self.at_work) > self.idle_s

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
                keep(connection, request, fds, Inheritance(self.path, self.said))
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
        folders = import_folders(env)
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
    sys.path_importer_cache.clear()
    gc.collect()
    gc.freeze()
    _return_program_pages()
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"importing torch left {len(threads)} threads, and a fork would have lost all but one")
    if any(os.path.realpath(f"/proc/self/fd/{fd}").startswith("/dev/nvidia") for fd in os.listdir("/proc/self/fd")):
        raise RuntimeError("importing torch opened a GPU, which no fork can use after that")


def _return_program_pages() -> None:
    """Give back the pages of program text that importing has run through: they are read from the page cache if run again.

    Text only: what the loader has written to in a file's mapping would be lost.
    """
    give_back = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, _offset, _device, inode, *_ = line.split()
        if permissions == "r-xp" and inode != "0":
            start, end = (int(address, 16) for address in span.split("-"))
            give_back(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)


def _forget_warnings() -> None:
    """A warning is shown once per place; what was shown here has not been shown to any rank."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            module.__dict__.pop("__warningregistry__", None)
    warnings.onceregistry.clear()  # type: ignore[attr-defined]


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


def main(listening_fd: int, owner: int, folder: str) -> None:
    """Preload, serve, and leave nothing behind."""
    os.environ.pop(wire.ENV_ROOM, None)
    try:
        zygote = Zygote(owner, float(os.environ.get(wire.ENV_WARM_IDLE_S, wire.WARM_IDLE_S)))
        watched_calls.arm()
        preload(*NEEDED_BY_ALL)
        be_fit_to_fork()
        _check_mark()
        zygote.said = Path(folder, wire.ZYGOTE_LOG).read_bytes()
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
