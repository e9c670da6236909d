"""What this rank takes of the machine's memory and of its GPU, read cheaply enough for every step; `monitor.py` asks.

On Linux the resident memory costs one read of a file that stays open, 2 µs; elsewhere psutil tells it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .budget import Budget
from .limits import MIB, CpuMemory, GpuMemory

if TYPE_CHECKING:
    import torch

PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / MIB if hasattr(os, "sysconf") else 0.0
CGROUPS = "/sys/fs/cgroup"


class Rss:
    """The resident memory of this process in MiB."""

    def __init__(self) -> None:
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC) if sys.platform == "linux" else -1
        self._most_mib = 0.0

    def __del__(self) -> None:
        if self._statm >= 0:
            os.close(self._statm)

    def now_mib(self) -> float:
        """What is resident now."""
        now_mib = float(self._pages()[1] * PAGE_MIB if self._statm >= 0 else _asked())
        self._most_mib = max(self._most_mib, now_mib)
        return now_mib

    def anonymous_mib(self) -> float:
        """Of it, what is no file's and nobody shares, where tensors are. Linux alone."""
        _, resident, shared = self._pages()
        return (resident - shared) * PAGE_MIB

    def peak_mib(self) -> float:
        """The most that was resident, as the system has it, or else as this object saw it."""
        self.now_mib()
        with contextlib.suppress(OSError, StopIteration), open("/proc/self/status", encoding="utf-8") as file:
            line = next(line for line in file if line.startswith("VmHWM"))
            # A memory budget begins a new count.
            self._most_mib = max(self._most_mib, int(line.split()[1]) / 1024)
        return self._most_mib

    def _pages(self) -> list[int]:
        return [int(field) for field in os.pread(self._statm, 128, 0).split()[:3]]


class OnCpu:
    """The CPU's memory, which all ranks on this host share."""

    # The kind of budget that holds here.
    budgets = CpuMemory

    def __init__(self) -> None:
        self.rss = Rss()
        found_mib, whose = min(_limits())
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.limit = (
            found_mib / ranks,
            whose if ranks == 1 else f"a share of {whose}, of {found_mib:.0f} MiB for {ranks} ranks",
        )
        self._floor: tuple[Budget, float] | None = None

    def used_mib(self, budget: Budget | None) -> float:
        """Resident memory, or what the tensors take where there is a budget for them."""
        if budget is None:
            return self.rss.now_mib()
        if self._floor is None or self._floor[0] is not budget:
            # The budget knows what is there without tensors, but asking it takes 20 times as long.
            self._floor = (budget, self.rss.anonymous_mib() - budget.used_mib())
        return max(0.0, self.rss.anonymous_mib() - self._floor[1])

    def stats(self) -> None:
        """There is no device."""


class OnGpu:
    """The memory of one GPU, as torch's caching allocator has it."""

    budgets = GpuMemory

    def __init__(self, device: torch.device) -> None:
        import torch

        self.rss = Rss()
        self._device = device
        self.limit = (torch.cuda.get_device_properties(device).total_memory / MIB, f"what {device} has")

    def used_mib(self, budget: Budget | None) -> float:
        """What the allocator has taken, for tensors that are there and those that were."""
        return self._bytes()["reserved_bytes"]["all"]["current"] / MIB

    def stats(self) -> dict[str, float]:
        """What tensors take, what the allocator has taken for them, and the peaks of both, in MiB."""
        found: dict[str, float] = {}
        for what in ("allocated", "reserved"):
            sizes = self._bytes()[f"{what}_bytes"]["all"]
            found |= {f"{what}_mib": sizes["current"] / MIB, f"peak_{what}_mib": sizes["peak"] / MIB}
        return {name: round(value, 1) for name, value in found.items()}

    def _bytes(self) -> Any:
        import torch

        # The nested form is torch's own; the flat one is made of it at every call.
        return torch.cuda.memory_stats_as_nested_dict(self._device)


Place = OnCpu | OnGpu


def _asked() -> float:
    import psutil

    return float(psutil.Process().memory_info().rss / MIB)


def _limits() -> Iterator[tuple[float, str]]:
    """What the processes on this host may take, by the machine and by each cgroup that holds this one."""
    import psutil

    yield psutil.virtual_memory().total / MIB, "the machine's memory"
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                yield from _of_cgroup(Path(CGROUPS, "memory" if controllers else ""), path)


def _of_cgroup(mount: Path, path: str) -> Iterator[tuple[float, str]]:
    """The limits of the cgroup at `path` and of those around it, in version 1 or 2; in a container only the mount is there."""
    for folder in (Path(path), *Path(path).parents):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                # "max" is no number, and no limit.
                yield int((mount / str(folder).lstrip("/") / name).read_text()) / MIB, "the cgroup's limit"
