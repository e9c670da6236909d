"""Profiles a few steps of a training run: a trace by torch's profiler, and what `CommProfiler` measures."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

import torch

from ddpkit.rank.comm.profiler import CommProfiler
from ddpkit.rank.joining.process_group import Here
from ddpkit.rank.reports import report

# Steps before (DDP lays out its buckets in the first), and steps that are profiled.
BEFORE, PROFILED = 3, 5

logger = logging.getLogger("ddpkit.rank")


class Profile:
    """Context manager over a training loop; `step()` after each step. Does nothing unless `enabled`.

    It writes `trace_rank_<r>.json` into `folder`, which opens in Perfetto, and reports `CommProfiler.stats()`.
    """

    def __init__(self, model: torch.nn.Module, enabled: bool, folder: str | Path, here: Here) -> None:
        self._model, self._enabled, self._folder, self._here = model, enabled, Path(folder), here
        self._around = ExitStack()
        self._steps = 0
        self._comm: CommProfiler | None = None

    def __enter__(self) -> Profile:
        return self

    def step(self) -> None:
        if not self._enabled:
            return
        self._steps += 1
        if self._steps == BEFORE:
            self._begin()
        elif self._steps == BEFORE + PROFILED:
            self._finish()

    def __exit__(self, kind: object, *_: object) -> None:
        if BEFORE <= self._steps < BEFORE + PROFILED:
            if kind is None:
                self._finish()
            else:
                # The other ranks may be gone, and `stats()` would wait for them.
                self._around.close()

    def _begin(self) -> None:
        if isinstance(self._model, torch.nn.parallel.DistributedDataParallel):
            self._comm = self._around.enter_context(CommProfiler(self._model))
        self._trace = self._around.enter_context(torch.profiler.profile())

    def _finish(self) -> None:
        self._around.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"trace_rank_{self._here.rank}.json"
        self._trace.export_chrome_trace(str(path))
        logger.info("a trace of %d steps is in %s", self._steps - BEFORE, path)
        if self._comm is not None:
            report(comm=self._comm.stats())
            logger.info("%s", self._comm.table())
