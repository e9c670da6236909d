"""The process that imports torch once, and from which warm jobs are forked.

`processes/zygote.py` starts one per kernel as `python -u zygote.py LISTENING_FD OWNER_PID FOLDER`. For each request it
forks a keeper, and the keeper forks the agent or the rank, as in a cold job. This file preloads, and decides whether a
fork would be the same job; `forked.py` has what a fork takes on.
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

# Chosen by measurement (docs/launch.md): what torchrun's agent and every rank import, and then, while there is no
# request, what many DDP scripts import. DDP's constructor imports torch._dynamo, which takes a second.
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
# Variables that a process, Python, torch or its libraries read at their start: too late to set them for a fork.
READ_AT_START = (
    *("LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "PYTHON", "TORCH", "PYTORCH", "ATEN_", "KINETO_", "NPY_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_"),
)
# Of these, those that are read later, and those that `forked._be_torch_of` applies after the fork.
READ_LATER = (
    *("TORCHELASTIC_", "TORCH_ELASTIC_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_DIST_", "TORCH_HOME"),
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "PYTHON_EXEC", "PYTHONPATH", "PYTHONUNBUFFERED"),
    # torch sets it in a kernel that takes an optimizer step, and reads it when it compiles.
    "TORCHINDUCTOR_CACHE_DIR",
)
MADE_GOOD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG")
MADV_DONTNEED = 4
TICK_S = 0.5
QUIET_S = 0.4


class Zygote:
    """Serves one kernel until that is gone, or no request came for `idle_s` seconds."""

    def __init__(self, owner: int, idle_s: float) -> None:
        self.owner = keeper.Owner(owner)
        self.idle_s = idle_s
        self.env = dict(os.environ)
        self.folders = import_folders(self.env)
        self.path = [p for p in sys.path[1:] if p not in self.folders]
        self.packages = _changed_ns()
        self.said = b""
        self.keepers: set[int] = set()
        # When it began, had its last request, and last had a running job.
        self.began, self.asked, self.at_work = time.monotonic(), -math.inf, -math.inf

    def serve(self, listener: socket.socket) -> None:
        """Answer requests; returns when the zygote is out of date, idle, or its owner is gone."""
        later, stale = list(NEEDED_BY_MANY), False
        self.began = time.monotonic()
        while not (stale or self.owner.gone() or self._idle()):
            # The ranks of a job ask a moment after their agent, and an import in between would hold them up. It goes on
            # while a job runs: otherwise, with job after job, every rank would have to import this itself.
            importing = later and time.monotonic() - self.asked > QUIET_S
            if select.select([listener], [], [], 0 if importing else TICK_S)[0]:
                stale = self._meet(listener)
            elif importing:
                preload(later.pop(0))
                if not later:
                    be_fit_to_fork()

    def _meet(self, listener: socket.socket) -> bool:
        """Accept and answer the next request; returns whether this zygote is out of date."""
        accepted = listener.accept()[0]
        accepted.settimeout(PATIENCE_S)
        connection = Connection(accepted)
        try:
            return self._answer(connection, listener)
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            # The asking process is gone, or speaks another protocol.
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
        """Fork the requested process or decline; returns whether this zygote is out of date."""
        if connection.peer()[1] != os.geteuid():
            return False
        connection.socket.send(READY)
        request, fds = connection.receive(most_fds=3)
        self.asked = time.monotonic()
        try:
            # A rank need not be checked: it has its agent's environment and what torchrun adds.
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
            # The forked process has closed them already.
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _why_not(self, request: Mapping[str, Any]) -> tuple[str, bool]:
        """Why the requested job cannot be forked here, or ""; and whether a new zygote could fork it."""
        if self.packages != _changed_ns():
            return "packages were installed or removed since the warm process started", True
        return self._what_would_differ(request), False

    def _what_would_differ(self, request: Mapping[str, Any]) -> str:
        """How the requested job would differ if it were forked here; "" if it would not."""
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
        """The module in `folders` that a cold job would import instead of one loaded here; "" if none."""
        loaded = {name.partition(".")[0] for name in (*sys.modules, *NEEDED_BY_MANY)}
        loaded -= {"__main__", "ddpkit", *sys.builtin_module_names}
        for folder in folders:
            for name in sorted((loaded | {"sitecustomize", "usercustomize"}) & _modules_in(folder)):
                return f"{folder} has a module {name}, which would take the place of one that is loaded already"
        return ""


def _too_late(name: str) -> bool:
    """Whether a process that imported torch has already read the variable `name`."""
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
    """When each folder of packages was last changed by an installation."""
    found = {}
    for folder in (*site.getsitepackages(), site.getusersitepackages()):
        if os.path.isdir(folder):
            found[folder] = os.stat(folder).st_mtime_ns
    return found


def preload(*names: str) -> None:
    """Import modules `names`, except those that this version of torch does not have."""
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


def be_fit_to_fork() -> None:
    """Prepare this process for forks; check that it has one thread and no GPU.

    Raises:
        RuntimeError: it has more threads, or opened a GPU.
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
    """Free the pages of program text that importing has used; they come back from the page cache.

    Only text: pages of a file that the loader has written to would be lost.
    """
    give_back = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, _offset, _device, inode, *_ = line.split()
        if permissions == "r-xp" and inode != "0":
            start, end = (int(address, 16) for address in span.split("-"))
            give_back(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)


def _forget_warnings() -> None:
    """Forget the warnings shown here: each is shown once per place, and no rank has shown it."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            module.__dict__.pop("__warningregistry__", None)
    warnings.onceregistry.clear()  # type: ignore[attr-defined]


def _check_mark() -> None:
    """Check that a fork can show the job's mark in /proc, for the sweep.

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
    """Preload, serve, and delete the folder if the owner is gone."""
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
