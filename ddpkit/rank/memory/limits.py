"""The memory of a rank's tensors, on the CPU or a GPU: how much they take, and how to limit it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import mmap
import resource
import sys
from pathlib import Path
from typing import Any

import torch

MIB = 1 << 20

# From <malloc.h>. With these, a freed tensor goes back to the system at once. By default glibc does so only above a size
# that grows with each freed tensor, up to 32 MiB.
M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -2, -3, -8
TENSORS_FROM_BYTES = 128 << 10
# Room for the small pieces that Python needs while it handles an error.
HEAP_AHEAD_BYTES = 4 * MIB

# Resets the peak of the resident memory (VmHWM) to what it is now.
CLEAR_PEAK = "5"


class CpuMemory:
    """The memory of this process's tensors: those that exist now, and all that the process grows by."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise RuntimeError(f"memory_budget: on the CPU this needs Linux, and this is {sys.platform}.")
        _give_back_what_is_freed()
        _warm_up()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.held_mib = sum(size for size, _ in cpu_tensors().values()) / MIB
        self._floor_mib = status_mib()["RssAnon"] - self.held_mib
        self._soft: int | None = None
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)

    def limit(self, mib: float) -> None:
        """Limit this process, and see that the system enforces it."""
        self._soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        asked = int((status_mib()["VmData"] - self.held_mib + mib) * MIB)
        if hard != resource.RLIM_INFINITY and asked > hard:
            raise RuntimeError(f"memory_budget: {mib:g} MiB are more than `ulimit -Hd` leaves this process.")
        # The hard limit stays, so that the soft one can be lifted again.
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
        """Restore the limit from before."""
        self.release(0)
        self._soft = None

    def release(self, pid: int) -> None:
        """Restore the limit from before in process `pid`, a child that has inherited ours; 0 is this process."""
        if self._soft is not None:
            with contextlib.suppress(OSError, ValueError):
                hard = resource.prlimit(pid, resource.RLIMIT_DATA)[1]
                resource.prlimit(pid, resource.RLIMIT_DATA, (self._soft, hard))

    def used_mib(self) -> float:
        """Resident memory without files, above what it was without tensors."""
        return max(0.0, status_mib()["RssAnon"] - self._floor_mib)

    def peak_mib(self) -> float:
        """The peak of it. The system has only the peak of all resident memory; files, which hardly shrink, are subtracted."""
        now = status_mib()
        peak = now["VmHWM"] - now["RssFile"] - now["RssShmem"]
        return max(0.0, peak - self._floor_mib, now["RssAnon"] - self._floor_mib)


class GpuMemory:
    """What torch's caching allocator has on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total_mib = torch.cuda.get_device_properties(device).total_memory / MIB
        self.held_mib = torch.cuda.memory_reserved(device) / MIB
        torch.cuda.reset_peak_memory_stats(device)

    def limit(self, mib: float) -> None:
        """Limit the allocator."""
        if mib > self._total_mib:
            raise ValueError(f"memory_budget: {mib:g} MiB asked for, but {self._device} has {self._total_mib:.0f} MiB.")
        torch.cuda.set_per_process_memory_fraction(mib / self._total_mib, self._device)

    def lift(self) -> None:
        """Allow all of the GPU again."""
        # A forked process must not touch the GPU, and has no allocator to limit.
        if not torch.cuda._is_in_bad_fork():
            torch.cuda.set_per_process_memory_fraction(1.0, self._device)

    def release(self, pid: int) -> None:
        """Nothing to do: another process has its own allocator."""

    def used_mib(self) -> float:
        """What the allocator has taken from the GPU, for present and past tensors."""
        return torch.cuda.memory_reserved(self._device) / MIB

    def peak_mib(self) -> float:
        return torch.cuda.max_memory_reserved(self._device) / MIB


def cpu_tensors() -> dict[int, tuple[int, Any]]:
    """The living tensors on the CPU: by the address of each piece of memory its bytes, and a tensor that uses it."""
    found: dict[int, tuple[int, Any]] = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            # A tensor without its own memory, such as a sharded one, has no storage.
            with contextlib.suppress(Exception):
                storage = each.untyped_storage()
                if each.device.type == "cpu" and (address := storage.data_ptr()) and address not in found:
                    found[address] = (storage.nbytes(), each)
    return found


def _give_back_what_is_freed() -> None:
    c = ctypes.CDLL(None)
    for option, value in ((M_MMAP_THRESHOLD, TENSORS_FROM_BYTES), (M_TOP_PAD, HEAP_AHEAD_BYTES), (M_ARENA_MAX, 1)):
        c.mallopt(option, value)


def _warm_up() -> None:
    """Do now what takes memory only the first time: import torch._dynamo, as DDP's constructor does (70 MiB), and start the
    threads of a backward and of a large product."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._dynamo")
    with torch.enable_grad():
        weight = torch.ones(256, 256, requires_grad=True)
        (torch.ones(256, 256) @ weight).relu().sum().backward()
    # Large enough that each thread of the pool gets a share.
    torch.ones(torch.get_num_threads() << 16).relu()


def status_mib() -> dict[str, float]:
    """The sizes in /proc/self/status, in MiB."""
    found = {}
    with open("/proc/self/status", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if value.endswith(" kB\n"):
                found[name] = int(value.split()[0]) / 1024
    return found
