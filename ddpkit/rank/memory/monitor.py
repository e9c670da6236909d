"""`MemoryMonitor`: what this rank's memory comes to, step by step, a word in time, and a snapshot when it has run out.

`usage.py` reads the figures, `snapshot.py` finds out what is in the memory. The limit is that of `budget.py`'s budget where
one is in force.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ddpkit.rank.reports import report
from ddpkit.recorder import failure

from . import budget, snapshot
from .usage import OnCpu, OnGpu, Place

if TYPE_CHECKING:
    import torch

log = logging.getLogger("ddpkit.rank")


class MemoryMonitor:
    """Context manager over a training loop: `with MemoryMonitor() as monitor:`, and `monitor.step()` once a step.

    It warns, once at each threshold, by the logger "ddpkit.rank", and does no more than that: a rank that stopped alone would
    leave the others waiting for it. An exception that says that memory ran out leaves a snapshot behind on its way out.

    What is held against the limit is what the allocator has taken, on a GPU; on the CPU the resident memory of this process,
    or of its tensors where a `memory_budget` is in force.

    Args:
        limit_mib: by default the budget in force, else what the GPU has, else this rank's share of what the cgroup or the
            machine has: that, divided by the ranks on this host. MiB of 2**20 bytes, here as everywhere.
        warn_at: shares of the limit.
        every: look at the memory in every so-many-th step.
        folder: where snapshots go; by default this rank's own in the run folder, outside a ddpkit job the working directory.
        device: the CPU or a GPU; by default the current GPU where the backend is NCCL or CUDA is in use, otherwise the CPU.
        history: on a GPU, have the snapshot tell where each tensor was made, which costs something for every tensor.

    Raises:
        ValueError: a limit or an interval is not above 0, or a threshold not above 0 and at most 1.
    """

    def __init__(
        self,
        limit_mib: float | None = None,
        warn_at: Sequence[float] = (0.8, 0.95),
        every: int = 1,
        folder: str | os.PathLike[str] | None = None,
        device: torch.device | str | None = None,
        history: bool = False,
    ) -> None:
        if limit_mib is not None and limit_mib <= 0:
            raise ValueError(f"MemoryMonitor: limit_mib={limit_mib:g} asked for; give MiB above 0, or None.")
        if every < 1:
            raise ValueError(f"MemoryMonitor: every={every} asked for; give a number of steps, 1 or more.")
        if not all(0 < share <= 1 for share in warn_at):
            raise ValueError(
                f"MemoryMonitor: warn_at={tuple(warn_at)} asked for; give shares of the limit, such as 0.8."
            )
        self._limit_mib, self._every, self._device = limit_mib, every, device
        self._marks = sorted(warn_at)
        self._folder = folder
        self._history = history
        self._place: Place | None = None
        self._steps = 0

    def __enter__(self) -> MemoryMonitor:
        where = _device(self._device)
        self._place = OnGpu(where) if where.type == "cuda" else OnCpu()
        if self._records():
            snapshot.keep_history(True)
        self._look()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Whatever goes wrong in here, the error that passes through is what the job has to hear of.
        with contextlib.suppress(Exception):
            if error is not None and budget.is_out_of_memory(error):
                self.snapshot()
        with contextlib.suppress(Exception):
            report(memory=self.stats())
        with contextlib.suppress(Exception):
            if self._records():
                snapshot.keep_history(False)

    def step(self) -> None:
        """Count a step, and look at the memory if it is its turn."""
        self._steps += 1
        if self._steps % self._every == 0:
            self._look()

    def stats(self) -> dict[str, Any]:
        """Plain data, in MiB: `rss_mib`, `peak_rss_mib`, `used_mib` of `limit_mib`, whose limit `limit` that is, `steps`, and
        `device`: None on the CPU, else `allocated_mib`, `reserved_mib` and the peaks of both, as torch's allocator counts.

        Raises:
            RuntimeError: the monitor has not been entered.
        """
        place = self._entered()
        limit_mib, limit = self._limit()
        found: dict[str, Any] = {"rss_mib": place.rss.now_mib(), "peak_rss_mib": place.rss.peak_mib()}
        found |= {"used_mib": self._used_mib(), "limit_mib": limit_mib}
        found = {name: round(value, 1) for name, value in found.items()}
        return {**found, "limit": limit, "steps": self._steps, "device": place.stats()}

    def snapshot(self) -> Path | None:
        """Write down what is in the memory, and say by the logger where: on the CPU as JSON, on a GPU as a pickle that
        https://pytorch.org/memory_viz draws. None where that failed, which is logged too.

        Raises:
            RuntimeError: the monitor has not been entered.
        """
        place = self._entered()
        name = f"memory_rank_{os.environ.get('RANK', '0')}_step_{self._steps}"
        try:
            folder = Path(self._folder) if self._folder is not None else failure.own_folder() or Path.cwd()
            folder.mkdir(parents=True, exist_ok=True)
            path = (
                snapshot.of_gpu(folder / name)
                if isinstance(place, OnGpu)
                else snapshot.of_cpu(folder / name, self.stats())
            )
        except Exception as error:
            log.warning("memory: the snapshot could not be written: %s: %s", type(error).__name__, error)
            return None
        log.warning("memory: at step %d a snapshot was written to %s", self._steps, path)
        return path

    def _look(self) -> None:
        used_mib, (limit_mib, limit) = self._used_mib(), self._limit()
        while self._marks and used_mib >= self._marks[0] * limit_mib:
            share = self._marks.pop(0)
            if self._marks and used_mib >= self._marks[0] * limit_mib:
                # The higher threshold says it all.
                continue
            log.warning(
                "memory: %.0f of %.0f MiB in use at step %d, %.0f %%, over the mark of %.0f %%; the limit is %s",
                *(used_mib, limit_mib, self._steps, 100 * used_mib / limit_mib, 100 * share, limit),
            )

    def _limit(self) -> tuple[float, str]:
        """The limit and whose it is."""
        if self._limit_mib is not None:
            return self._limit_mib, "limit_mib"
        budget = self._budget()
        if budget is not None and budget.mib is not None:
            return budget.mib, "the memory budget"
        return self._entered().limit

    def _used_mib(self) -> float:
        return self._entered().used_mib(self._budget())

    def _budget(self) -> budget.Budget | None:
        """The budget in force where the tensors are, if its limit is to count."""
        asked = budget._budget
        if self._limit_mib is not None or asked is None or asked.mib is None:
            return None
        return asked if isinstance(asked._memory, self._entered().budgets) else None

    def _records(self) -> bool:
        return self._history and isinstance(self._place, OnGpu)

    def _entered(self) -> Place:
        if self._place is None:
            raise RuntimeError("MemoryMonitor: it looks at the memory inside its `with` block; enter it first.")
        return self._place


def _device(asked: torch.device | str | None) -> torch.device:
    import torch

    if asked is None and torch.cuda.is_initialized():
        asked = torch.device("cuda", torch.cuda.current_device())
    return budget._device(None if asked is None else torch.device(asked))
