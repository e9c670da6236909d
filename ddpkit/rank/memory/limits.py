"""Where the tensors of a rank are, on the CPU or a GPU: what they take there, and how they are held to a limit."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import mmap
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

MIB = 1 << 20

# From <malloc.h>. With these, a tensor that is freed goes back to the system at once. Left alone, glibc raises the size
# from which it does so with each tensor that is freed, up to 32 MiB, and keeps what is smaller.
M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -2, -3, -8
TENSORS_FROM_BYTES = 128 << 10
# What Python asks for in small pieces while an error is on its way is taken from here.
HEAP_AHEAD_BYTES = 4 * MIB

# Resets the peak of the resident memory (VmHWM) to what it is now.
CLEAR_PEAK = "5"


class Memory(Protocol):
    """Where the tensors are: what they take there, and how they are held to a limit."""

    held_mib: float

    def limit(self, mib: float) -> None: ...
    def lift(self) -> None: ...
    def release(self, pid: int) -> None: ...
    def used_mib(self) -> float: ...
    def peak_mib(self) -> float: ...


class CpuMemory:
    """The part of this process's memory that its tensors take: what it has grown by, and those that were there before.

    Raises:
        RuntimeError: this is not Linux.
    """

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise RuntimeError(f"memory_budget: on the CPU this takes Linux, and this is {sys.platform}.")
        _give_back_what_is_freed()
        _warm_up()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.held_mib = _storage_bytes(o for o in gc.get_objects() if _is_on_cpu(o)) / MIB
        self._floor_mib = _status()["RssAnon"] - self.held_mib
        self._soft: int | None = None
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)

    def limit(self, mib: float) -> None:
        """Hold this process to it, and see that the system does.

        Raises:
            RuntimeError: the system does not.
        """
        import resource

        self._soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        asked = int((_status()["VmData"] - self.held_mib + mib) * MIB)
        if hard != resource.RLIM_INFINITY and asked > hard:
            raise RuntimeError(f"memory_budget: {mib:g} MiB are more than `ulimit -Hd` leaves this process.")
        # The hard limit stays, so that this one can be lifted again.
        resource.setrlimit(resource.RLIMIT_DATA, (asked, hard))
        try:
            mmap.mmap(-1, int((mib + 1) * MIB), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except OSError:
            return
        self.lift()
        raise RuntimeError(
            "memory_budget: this system does not hold a process to RLIMIT_DATA, so there is no budget here."
        )

    def lift(self) -> None:
        """The limit that was there before."""
        self.release(0)
        self._soft = None

    def release(self, pid: int) -> None:
        """Lift the limit in process `pid`, a child that has inherited it; 0 is this one."""
        import resource

        if self._soft is not None:
            with contextlib.suppress(OSError, ValueError):
                hard = resource.prlimit(pid, resource.RLIMIT_DATA)[1]
                resource.prlimit(pid, resource.RLIMIT_DATA, (self._soft, hard))

    def used_mib(self) -> float:
        """Resident memory that is no file's, above what it was without tensors."""
        return max(0.0, _status()["RssAnon"] - self._floor_mib)

    def peak_mib(self) -> float:
        """Its peak. The system keeps that of all resident memory; files only ever come in, and are taken off as they are now."""
        now = _status()
        peak = now["VmHWM"] - now["RssFile"] - now["RssShmem"]
        return max(0.0, peak - self._floor_mib, now["RssAnon"] - self._floor_mib)


class GpuMemory:
    """What torch's caching allocator has on one GPU."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._total_mib = torch.cuda.get_device_properties(device).total_memory / MIB
        self.held_mib = torch.cuda.memory_reserved(device) / MIB
        torch.cuda.reset_peak_memory_stats(device)

    def limit(self, mib: float) -> None:
        """Hold the allocator to it.

        Raises:
            ValueError: the GPU has less.
        """
        if mib > self._total_mib:
            raise ValueError(f"memory_budget: {mib:g} MiB asked for, but {self._device} has {self._total_mib:.0f} MiB.")
        self._set(mib / self._total_mib)

    def lift(self) -> None:
        """All of the GPU again."""
        # A process that was forked must not touch the GPU, and has no allocator that could be limited.
        if not _is_fork():
            self._set(1.0)

    def release(self, pid: int) -> None:
        """Another process has an allocator of its own."""

    def used_mib(self) -> float:
        """What the allocator has taken from the GPU, for tensors that are there and those that were."""
        import torch

        return torch.cuda.memory_reserved(self._device) / MIB

    def peak_mib(self) -> float:
        """The most of it."""
        import torch

        return torch.cuda.max_memory_reserved(self._device) / MIB

    def _set(self, share: float) -> None:
        import torch

        torch.cuda.set_per_process_memory_fraction(share, self._device)


def _is_fork() -> bool:
    import torch

    return torch.cuda._is_in_bad_fork()


def _is_on_cpu(thing: Any) -> bool:
    """Whether it is a tensor with memory of its own on the CPU. A sharded one has its part in another tensor."""
    import torch

    plain = type(thing) in (torch.Tensor, torch.nn.Parameter)
    return plain and thing.device.type == "cpu" and thing.layout == torch.strided


def _storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the memory that `tensors` lie in, counted once where several lie in the same."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _give_back_what_is_freed() -> None:
    c = ctypes.CDLL(None)
    for option, value in ((M_MMAP_THRESHOLD, TENSORS_FROM_BYTES), (M_TOP_PAD, HEAP_AHEAD_BYTES), (M_ARENA_MAX, 1)):
        c.mallopt(option, value)


def _warm_up() -> None:
    """Do once what takes memory only the first time: DDP's constructor imports torch._dynamo (70 MiB), the threads of a
    backward and of a large product start."""
    import torch

    with contextlib.suppress(ImportError):
        importlib.import_module("torch._dynamo")
    with torch.enable_grad():
        weight = torch.ones(256, 256, requires_grad=True)
        (torch.ones(256, 256) @ weight).relu().sum().backward()
    # Each thread of the pool gets a share.
    torch.ones(torch.get_num_threads() << 16).relu()


def _status() -> dict[str, float]:
    """The sizes in /proc/self/status, in MiB."""
    found = {}
    with open("/proc/self/status", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if value.endswith(" kB\n"):
                found[name] = int(value.split()[0]) / 1024
    return found
