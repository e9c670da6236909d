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

# As torch's flight recorder spells them.
_BYTES = {
    **dict.fromkeys(("Bool", "Byte", "Char", "Float8_e4m3fn", "Float8_e5m2"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16"), 2),
    **dict.fromkeys(("Int", "Float"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}


class CommProfiler:
    """Context manager around training steps of a DDP model, entered by every rank: `with CommProfiler(net) as comm:`.

    Gradients are averaged exactly as without it. Inside the block `stats()` covers this rank alone. After it, `stats()`
    reads the other ranks' waits from the store: it is no collective, so rank 0 may call it alone. The hook then only
    averages, which costs one more pass over the gradients than DDP alone. A model can be profiled again.

    Args:
        ddp_model: a `DistributedDataParallel`. If it has a comm hook already, its buckets are not timed, and
            `stats()["note"]` says so. DDP takes one hook: register your own first.
        enabled: False switches everything off.
        trace: also time every collective by torch's profiler. That costs much more: use it for a few steps.

    Raises:
        TypeError: the model is not a `DistributedDataParallel`.
        RuntimeError: on entry, the model is being profiled already.
    """

    def __init__(self, ddp_model: DistributedDataParallel, enabled: bool = True, trace: bool = False) -> None:
        if not isinstance(ddp_model, DistributedDataParallel):
            raise TypeError(
                f"CommProfiler: a model wrapped in DistributedDataParallel asked for, but this is a {type(ddp_model).__name__}; "
                "hand over what DistributedDataParallel(model) returned."
            )
        self._model, self._enabled, self._trace = ddp_model, enabled, trace
        self._clock: Clock = GpuClock(ddp_model.device) if ddp_model.device.type == "cuda" else HostClock()
        self._watch = Watch(ddp_model, self._clock)
        self._tap: buckets.Tap | None = None
        self._notes: list[str] = []
        self._tracing: Any = None
        self._spans: Any = None
        self._began_ns = self._number = 0
        # Known after the block.
        self._own: dict[str, Any] | None = None
        self._store: Any = None
        self._ranks: list[int] = []
        self._waited: dict[int, list[tuple[float, float]]] = {}

    def __enter__(self) -> CommProfiler:
        if not self._enabled:
            return self
        tap = buckets.tap(self._model)
        if isinstance(tap, str):
            self._notes.append(tap)
        elif tap.watch is not None:
            raise RuntimeError(
                "CommProfiler: this model is being profiled already; leave the other CommProfiler first."
            )
        else:
            self._tap, tap.watch = tap, self._watch
            self._watch.begin()
        if self._trace:
            self._start_tracing()
        global _entered
        self._number, _entered = _entered, _entered + 1
        self._began_ns = time.time_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._enabled:
            return
        if self._tap is not None:
            self._tap.watch = None
            self._watch.end()
        if self._tracing is not None:
            self._tracing.stop()
            self._spans, self._tracing = self._tracing, None
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
        - `collectives`: each `name`, `count`, `bytes` that this rank put in, `ms` in all (None without `trace`). The list
          is None if torch records no collectives.
        - `ranks`, after the block: each `rank`, `waited_ms` for the last rank of a step, `last_share` of the passes in
          which this rank was last; `straggler`: the rank that is usually last, or None.
        """
        own = self._own or self._found()
        waited, missing = self._of_all_ranks() if self._store is not None else ({}, "")
        note = " ".join(filter(None, [own["note"], missing]))
        return {**own, **stats.by_rank(waited, own["step_ms"]), "note": note}

    def to_dict(self) -> dict[str, Any]:
        """The same as `stats()`."""
        return self.stats()

    def table(self) -> str:
        """`stats()` as text."""
        return stats.table(self.stats())

    def _found(self) -> dict[str, Any]:
        """What this rank knows alone."""
        group = self._model.process_group
        watch = self._watch
        if watch.count:
            self._clock.settle()
        collectives, note = _collectives(self._began_ns, self._spans) if self._enabled else (None, "")
        return {
            "rank": dist.get_rank(),
            "world_size": group.size(),
            "backend": dist.get_backend(group),
            "device": str(self._model.device),
            "passes": watch.count,
            "bytes": watch.bytes,
            **stats.timed(watch.passes, self._clock),
            "collectives": collectives,
            "note": " ".join(filter(None, [*self._notes, note])),
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
                unknown = "Which rank waits for which is not known: not every rank left its CommProfiler"
                return {}, f"{unknown} within {OTHERS_WITHIN_S} s."
        return self._waited, ""

    def _start_tracing(self) -> None:
        if torch.autograd._profiler_enabled():
            # A second profiler would end the first without a word.
            self._notes.append("torch's profiler runs already, so that this one could not trace the collectives.")
            return
        self._tracing = torch.profiler.profile()
        self._tracing.start()


def _collectives(since_ns: int, spans: Any) -> tuple[list[dict[str, Any]] | None, str]:
    """Every collective since then by name, from the flight recorder and the profiler; and a note on what is missing."""
    entries, kept = _recorded(since_ns)
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        row = found.setdefault(entry["profiling_name"], {"count": 0, "bytes": 0, "ms": None})
        row["count"] += 1
        row["bytes"] += sum(
            math.prod(shape) * _BYTES.get(kind, 0)
            for shape, kind in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
        )
    for name, (count, ms) in _spanned(spans).items():
        found.setdefault(name, {"count": count, "bytes": None})["ms"] = round(ms, 4)
    if not kept and spans is None:
        return None, "This torch records no collectives of this backend; trace=True counts them."
    # The recorder numbers all entries and drops the oldest.
    lost = kept and len(entries) == kept and entries[0].get("record_id", 0) > 0
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


def _spanned(spans: Any) -> dict[str, tuple[int, float]]:
    """Count and ms of each collective in the profiler's events; on a GPU, of those on the GPU."""
    if spans is None:
        return {}
    named = [each for each in spans.events() if each.name.startswith(("gloo:", "nccl:"))]
    on_gpu = [each for each in named if str(each.device_type).endswith("CUDA")]
    found: dict[str, tuple[int, float]] = {}
    for each in on_gpu or named:
        count, ms = found.get(each.name, (0, 0.0))
        found[each.name] = (count + 1, ms + each.time_range.elapsed_us() / 1000)
    return found
