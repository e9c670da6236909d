"""`MemoryMonitor`: watches a rank's memory step by step, warns in time, and leaves a snapshot when it has run out."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch

from ddpkit.rank.reports import report
from ddpkit.recorder import failure

from . import budget, snapshot
from .host import share_of_host
from .limits import MIB, GpuMemory, status_mib

# It warns at these shares of the limit.
WARN_AT = (0.8, 0.95)

log = logging.getLogger("ddpkit.rank")


class MemoryMonitor:
    """Context manager over a training loop: `with MemoryMonitor() as monitor:`, and `monitor.step()` once a step.

    It warns once at 80 % and once at 95 % of the limit, by the logger "ddpkit.rank", and does nothing else: a rank that
    stopped alone would leave the others waiting. If memory runs out inside the block, it writes a snapshot.

    On a GPU the limit is compared with what the allocator has taken; on the CPU with the resident memory of this process,
    or with its tensors if a `memory_budget` is in force.

    Args:
        limit_mib: in MiB of 2**20 bytes; by default the budget in force, else all of the GPU, else the memory of the machine
            or of its cgroup, divided by the ranks on this host.
        every: look at the memory in every so-many-th step.
        device: the CPU or a GPU; by default the current GPU if the backend is NCCL or CUDA is in use, otherwise the CPU.

    Raises:
        ValueError: a limit or an interval is not above 0.
    """

    def __init__(
        self,
        limit_mib: float | None = None,
        every: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        if limit_mib is not None and limit_mib <= 0:
            raise ValueError(f"MemoryMonitor: limit_mib={limit_mib:g} asked for; give MiB above 0, or None.")
        if every < 1:
            raise ValueError(f"MemoryMonitor: every={every} asked for; give a number of steps, 1 or more.")
        if device is None and torch.cuda.is_initialized():
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = budget.default_device() if device is None else torch.device(device)
        self._on_gpu = self._device.type == "cuda"
        self._limit_mib, self._every = limit_mib, every
        self._process = psutil.Process()
        self._marks = list(WARN_AT)
        self._steps = 0
        if self._on_gpu:
            total = torch.cuda.get_device_properties(self._device).total_memory
            self._most = (total / MIB, f"what {self._device} has")
        else:
            self._most = share_of_host()

    def __enter__(self) -> MemoryMonitor:
        self._look()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Nothing that goes wrong here may replace the error that passes through.
        with contextlib.suppress(Exception):
            if error is not None and budget.is_out_of_memory(error):
                self.snapshot()
        with contextlib.suppress(Exception):
            report(memory=self.stats())

    def step(self) -> None:
        """Count a step, and look at the memory if it is its turn."""
        self._steps += 1
        if self._steps % self._every == 0:
            self._look()

    def stats(self) -> dict[str, Any]:
        """Plain data, in MiB: `rss_mib`, `peak_rss_mib`, `used_mib` of `limit_mib`, whose limit that is (`limit`), `steps`, and
        `device`: None on the CPU, else `allocated_mib`, `reserved_mib` and the peaks of both, as torch's allocator counts."""
        used_mib, limit_mib, limit = self._figures()
        found = {
            "rss_mib": self._rss_mib(),
            "peak_rss_mib": _peak_rss_mib(),
            "used_mib": used_mib,
            "limit_mib": limit_mib,
        }
        device = self._of_gpu() if self._on_gpu else None
        return {**_rounded(found), "limit": limit, "steps": self._steps, "device": device}

    def snapshot(self) -> Path | None:
        """Write down what is in the memory, and log where: on the CPU as JSON, on a GPU as a pickle that
        https://pytorch.org/memory_viz draws. None if that failed, which is logged too.

        The file is in this rank's own folder of the run, outside a ddpkit job in the working directory."""
        name = f"memory_rank_{os.environ.get('RANK', '0')}_step_{self._steps}"
        try:
            folder = failure.own_folder() or Path.cwd()
            if self._on_gpu:
                path = snapshot.of_gpu(folder / name)
            else:
                path = snapshot.of_cpu(folder / name, self.stats())
        except Exception as error:
            log.warning("memory: the snapshot could not be written: %s: %s", type(error).__name__, error)
            return None
        log.warning("memory: at step %d a snapshot was written to %s", self._steps, path)
        return path

    def _look(self) -> None:
        used_mib, limit_mib, limit = self._figures()
        passed = [share for share in self._marks if used_mib >= share * limit_mib]
        if passed:
            self._marks = [share for share in self._marks if share not in passed]
            log.warning(
                "memory: %.0f of %.0f MiB in use at step %d, %.0f %%, over the mark of %.0f %%; the limit is %s",
                *(used_mib, limit_mib, self._steps, 100 * used_mib / limit_mib, 100 * max(passed), limit),
            )

    def _figures(self) -> tuple[float, float, str]:
        """The MiB in use, the limit, and whose limit it is."""
        held = budget.in_force()
        if self._limit_mib is None and held and held.mib and isinstance(held.memory, GpuMemory) == self._on_gpu:
            return held.used_mib(), held.mib, "the memory budget"
        if self._on_gpu:
            # torch.cuda.memory_reserved() flattens all of this first.
            stats = torch.cuda.memory_stats_as_nested_dict(self._device)
            used_mib = stats["reserved_bytes"]["all"]["current"] / MIB
        else:
            used_mib = self._rss_mib()
        limit_mib, limit = self._most if self._limit_mib is None else (self._limit_mib, "limit_mib")
        return used_mib, limit_mib, limit

    def _rss_mib(self) -> float:
        return float(self._process.memory_info().rss / MIB)

    def _of_gpu(self) -> dict[str, float]:
        cuda, device = torch.cuda, self._device
        found = {"allocated_mib": cuda.memory_allocated(device), "reserved_mib": cuda.memory_reserved(device)}
        found |= {"peak_allocated_mib": cuda.max_memory_allocated(device)}
        found |= {"peak_reserved_mib": cuda.max_memory_reserved(device)}
        return _rounded({name: size / MIB for name, size in found.items()})


def _peak_rss_mib() -> float:
    """The peak of the resident memory. On Linux a memory budget has begun a new count."""
    with contextlib.suppress(OSError):
        return status_mib()["VmHWM"]
    # macOS, which has no /proc, counts bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB


def _rounded(found: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in found.items()}
