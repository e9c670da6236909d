"""`CommProfiler`: how long a DDP model communicates, by bucket, by collective and by rank.

`buckets.py` notes the times, `stats.py` computes the results. The device is waited for only at the end. Each rank then
puts its waits into the store: no collective is needed.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from . import buckets, stats
from .buckets import Clock, GpuClock, HostClock, Watch

# Ranks leave the last step together, so the others' waits are in the store within moments, or never.
OTHERS_WITHIN_S = 10

# Profilers that this rank has entered. Every rank counts alike, so the number is part of the keys.
_entered = 0


class CommProfiler:
    """Context manager around training steps of a DDP model, entered by every rank: `with CommProfiler(net) as comm:`.

    Gradients are averaged exactly as without it. Inside the block `stats()` covers this rank alone. After it, `stats()`
    reads the other ranks' waits from the store: it is no collective, so rank 0 may call it alone. The hook then only
    averages, which costs one more pass over the gradients than DDP alone. A model can be profiled again.

    Args:
        ddp_model: a `DistributedDataParallel`. If it has a comm hook already, its buckets are not timed, and
            `stats()["note"]` says so. DDP takes one hook: register your own first.

    Raises:
        TypeError: the model is not a `DistributedDataParallel`.
        RuntimeError: on entry, the model is being profiled already.
    """

    def __init__(self, ddp_model: DistributedDataParallel) -> None:
        if not isinstance(ddp_model, DistributedDataParallel):
            raise TypeError(
                f"CommProfiler: a model wrapped in DistributedDataParallel asked for, but this is a {type(ddp_model).__name__}; "
                "hand over what DistributedDataParallel(model) returned."
            )
        self._model = ddp_model
        self._clock: Clock = GpuClock(ddp_model.device) if ddp_model.device.type == "cuda" else HostClock()
        self._watch = Watch(ddp_model, self._clock)
        self._tap: buckets.Tap | None = None
        self._untimed = ""
        self._began_ns = self._number = 0
        # Known after the block.
        self._own: dict[str, Any] | None = None
        self._store: Any = None
        self._ranks: list[int] = []
        self._waited: dict[int, list[tuple[float, float]]] = {}

    def __enter__(self) -> CommProfiler:
        tap = buckets.tap(self._model)
        if isinstance(tap, str):
            self._untimed = tap
        elif tap.watch is not None:
            raise RuntimeError(
                "CommProfiler: this model is being profiled already; leave the other CommProfiler first."
            )
        else:
            self._tap, tap.watch = tap, self._watch
            self._watch.begin()
        global _entered
        self._number, _entered = _entered, _entered + 1
        self._began_ns = time.time_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._tap is not None:
            self._tap.watch = None
            self._watch.end()
        if error is None:
            self._own = self._found()
            if self._tap is not None:
                self._leave()

    def stats(self) -> dict[str, Any]:
        """The results as plain data, for `ddpkit.rank.report(comm=...)`: sizes in bytes, times in ms, medians of the last 200
        passes. A pass is a backward that reduced gradients; a step goes from one pass to the next.

        - `rank`, `world_size`, `backend`, `device`; `passes`, `bytes` of gradients in all; `note`: what is not known.
        - `step_ms`; `backward_ms`, until the last bucket is ready; `comm_ms`, while any bucket is under way;
          `exposed_ms`, the part of it after the last bucket is ready, which backward waits for; `hidden_share`, the share
          before that; `sync_ms`, the wait of forward for rank 0's buffers.
        - `buckets`: each `bucket`, `bytes`, `ready_ms` and `back_ms` since backward began, `ms` between them.
        - `collectives`: each `name`, `count`, `bytes` that this rank put in; None if torch records none. How long each took
          is in a trace by torch's own profiler.
        - `ranks`, after the block: each `rank`, `waited_ms` for the last rank of a step, `last_share` of the passes in
          which this rank was last; `straggler`: the rank that is usually last, or None.
        """
        own = self._own or self._found()
        waited, missing = self._of_all_ranks() if self._store is not None else ({}, "")
        note = " ".join(filter(None, [own["note"], missing]))
        return {**own, **stats.by_rank(waited, own["step_ms"]), "note": note}

    def table(self) -> str:
        """`stats()` as text."""
        return stats.table(self.stats())

    def _found(self) -> dict[str, Any]:
        """What this rank knows alone."""
        group = self._model.process_group
        watch = self._watch
        if watch.count:
            self._clock.settle()
        collectives, note = _collectives(self._began_ns)
        return {
            "rank": dist.get_rank(),
            "world_size": group.size(),
            "backend": dist.get_backend(group),
            "device": str(self._model.device),
            "passes": watch.count,
            "bytes": watch.bytes,
            **stats.timed(watch.passes, self._clock),
            "collectives": collectives,
            "note": " ".join(filter(None, [self._untimed, note])),
        }

    def _leave(self) -> None:
        """Put this rank's waits into the job's store."""
        waits = [stats.waits(each, self._clock) for each in self._watch.passes]
        self._ranks = dist.get_process_group_ranks(self._model.process_group)
        self._store = dist.distributed_c10d._get_default_store()
        self._store.set(self._key(dist.get_rank()), json.dumps(waits))

    def _key(self, rank: int) -> str:
        return f"ddpkit/comm/{self._number}/{rank}"

    def _of_all_ranks(self) -> tuple[dict[int, list[tuple[float, float]]], str]:
        """By rank and pass, the ms that each waited for buffers and for gradients; nothing and a sentence if unknown."""
        if not self._waited:
            keys = {rank: self._key(rank) for rank in self._ranks}
            try:
                self._store.wait(list(keys.values()), timedelta(seconds=OTHERS_WITHIN_S))
                self._waited = {rank: json.loads(self._store.get(key)) for rank, key in keys.items()}
            except RuntimeError:
                unknown = "Who waits for whom is not known: not every rank left its CommProfiler"
                return {}, f"{unknown} within {OTHERS_WITHIN_S} s."
        return self._waited, ""


def _collectives(since_ns: int) -> tuple[list[dict[str, Any]] | None, str]:
    """Every collective since then by name, from torch's flight recorder; and a note on what is missing."""
    entries, kept = _recorded(since_ns)
    if not kept:
        return None, "This torch records no collectives of this backend."
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        row = found.setdefault(entry["profiling_name"], {"count": 0, "bytes": 0})
        row["count"] += 1
        row["bytes"] += sum(
            math.prod(shape) * _item_bytes(kind)
            for shape, kind in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
        )
    # The recorder numbers all entries and drops the oldest.
    lost = len(entries) == kept and entries[0].get("record_id", 0) > 0
    note = f"Of the collectives only the last {kept} are counted." if lost else ""
    return [{"name": name, **row} for name, row in sorted(found.items())], note


def _recorded(since_ns: int) -> tuple[list[dict[str, Any]], int]:
    """The entries of torch's flight recorder since then, and how many it holds in all; (nothing, 0) if it has none."""
    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return [], 0
    with contextlib.suppress(Exception):
        entries = sorted(json.loads(dump()).get("entries", []), key=lambda each: each["time_created_ns"])
        return [each for each in entries if each["time_created_ns"] >= since_ns], len(entries)
    return [], 0


def _item_bytes(kind: str) -> int:
    """The size of a number of type `kind`, as the flight recorder spells it: "Long" is torch.long."""
    return getattr(torch, kind.lower(), torch.uint8).itemsize
