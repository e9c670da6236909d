"""The progress of a training run: figures summed on the device in each step, and exchanged by the ranks now and then.

A step costs no collective and no wait for the device. Every `log_interval` steps one all-gather exchanges the figures: the
mean loss, whose loss was not finite, which rank is slow.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from statistics import median

import torch
from tqdm import tqdm

from ddpkit.rank.guarding.guard import gathered
from ddpkit.rank.joining.process_group import Here
from ddpkit.rank.joining.words import in_words

# A slow rank takes this many times as long as the middle rank, and the difference is this share of a step.
SLOW_RATIO, SLOW_SHARE = 1.5, 1 / 3

logger = logging.getLogger("ddpkit.rank")


@dataclass(frozen=True)
class Interval:
    """What the ranks did since the last exchange; the same on every rank."""

    steps: int
    loss: float
    step_ms: float
    not_finite: dict[int, int]
    slow: str
    workers: dict[int, int]


class Progress:
    """Follows the steps of this rank. Rank 0 shows a bar on standard output, which the live view follows too."""

    def __init__(self, here: Here, total_steps: int, done: int, workers: int) -> None:
        self._here = here
        shown = {"total": total_steps, "initial": done, "unit": "step", "dynamic_ncols": True, "mininterval": 0.5}
        self._bar = tqdm(file=sys.stdout, disable=here.rank != 0, **shown)
        logger.addFilter(self._make_room)
        self._workers = dict.fromkeys(range(here.world_size), workers)
        self._begin()

    def _make_room(self, record: logging.LogRecord) -> bool:
        """Clear the bar before a line of the log."""
        self._bar.clear()
        return True

    def _begin(self) -> None:
        self._data_s: list[float] = []
        self._forward_s: list[float] = []
        self._loss = torch.zeros((), device=self._here.device, dtype=torch.float64)
        self._bad = torch.zeros((), device=self._here.device, dtype=torch.float64)
        self._since = time.perf_counter()

    def step(self, loss: torch.Tensor, data_s: float, forward_s: float) -> None:
        """Note a step: its mean loss on this rank, on the device, and the seconds for data and forward."""
        finite = torch.isfinite(loss)
        self._loss += torch.where(finite, loss, 0.0)
        self._bad += ~finite
        self._data_s.append(data_s)
        self._forward_s.append(forward_s)
        self._bar.update(1)

    def exchange(self, workers: int) -> Interval:
        """The figures of all ranks since the last exchange, by one all-gather. `workers`: of this rank's loader."""
        seconds = time.perf_counter() - self._since
        steps = len(self._data_s)
        # Medians: a rank that was slow once, because the machine was busy, holds up nobody for long.
        own_ms = 1000 * median(self._data_s or [0.0]), 1000 * median(self._forward_s or [0.0])
        step_ms = 1000 * seconds / max(1, steps)
        own = [steps, float(self._loss), float(self._bad), *own_ms, workers]
        rows = torch.stack(gathered(torch.tensor(own, dtype=torch.float64)))
        all_steps, losses, bad, data_ms, forward_ms, all_workers = rows.T.tolist()
        counted = sum(all_steps) - sum(bad)
        found = Interval(
            steps=steps,
            loss=sum(losses) / counted if counted else float("nan"),
            step_ms=step_ms,
            not_finite={rank: int(times) for rank, times in enumerate(bad) if times},
            slow=slow_ranks(list(zip(data_ms, forward_ms, strict=True)), step_ms),
            workers=dict(enumerate(map(int, all_workers))),
        )
        self._begin()
        return found

    def say(self, step: int, epoch: int, interval: Interval) -> None:
        """Log an interval: its loss, and warnings."""
        self._bar.set_postfix(loss=f"{interval.loss:.4f}", refresh=False)
        logger.info("epoch %d step %d loss %.4f %.1f ms/step", epoch, step, interval.loss, interval.step_ms)
        for rank, times in interval.not_finite.items():
            logger.warning(
                "step %d: the loss of rank %d was not finite in %d of %d steps", step, rank, times, interval.steps
            )
        for rank in lost_workers(self._workers, interval.workers):
            left = interval.workers[rank]
            logger.warning("step %d: the loader of rank %d lost a worker and goes on with %d", step, rank, left)
        self._workers = interval.workers
        if interval.slow:
            logger.warning("step %d: %s", step, interval.slow)
        self._bar.refresh()

    def close(self) -> None:
        logger.removeFilter(self._make_room)
        self._bar.close()


def lost_workers(before: dict[int, int], now: dict[int, int]) -> list[int]:
    """The ranks whose loader lost a worker; not those that follow suit in the next epoch."""
    fewer = [rank for rank, workers in now.items() if workers < before[rank]]
    return fewer if len(fewer) == len(now) else [rank for rank in fewer if now[rank] < max(now.values())]


def slow_ranks(own_ms: list[tuple[float, float]], step_ms: float) -> str:
    """Which ranks take longer than the middle one for data or forward, where no rank waits for others; "" if none.

    Args:
        own_ms: by rank, the milliseconds of a step for data and for forward. On a GPU forward is only queued, so a slow GPU
            does not show here; `CommProfiler` shows it.
        step_ms: milliseconds of a step.
    """
    for what, times in zip(("loading data", "forward"), zip(*own_ms, strict=True), strict=True):
        middle = sorted(times)[(len(times) - 1) // 2]
        slow = [r for r, ms in enumerate(times) if ms > SLOW_RATIO * middle and ms - middle > SLOW_SHARE * step_ms]
        if slow:
            holds = "holds" if len(slow) == 1 else "hold"
            figures = f"{max(times):.0f} ms of a step, the middle rank {middle:.0f} ms"
            return f"{in_words(slow)} {holds} up the others by {what}: {figures}"
    return ""
