"""`CommProfiler`: where the communication of a DDP model goes, by bucket, by collective and by rank.

`buckets.py` takes the moments, `stats.py` makes figures of them, `figure.py` draws. No device is waited for until the
end; then each rank leaves its waits in the store, and no rank joins a collective for it.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import buckets, stats
from .buckets import Clock, GpuClock, HostClock, Watch

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

# Ranks leave the last step together, so that the others' figures are there within moments, or do not come.
OTHERS_WITHIN_S = 10

# How many profilers this rank has entered: that many-th is the same on every rank.
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

    Gradients are averaged exactly as without it. As it ends, each rank leaves its waits in the job's store, where `stats()`
    finds those of the others: it is no collective, and may stand under `if rank == 0`. Before the end `stats()` tells of this
    rank alone. After it the hook that DDP keeps does nothing but average, with one more pass over the gradients than DDP by
    itself, and the model may be profiled again.

    Args:
        ddp_model: a `DistributedDataParallel`. With a comm hook of its own, its buckets are not timed; `stats()["note"]` says so.
            Register such a hook before this one: DDP takes no second.
        enabled: False makes all of it nothing.
        trace: have torch's profiler time every collective, those of DDP and of the program; costs much more, for a few steps.

    Raises:
        TypeError: the model is no `DistributedDataParallel`.
        RuntimeError: on entry, the model is being profiled already.
    """

    def __init__(self, ddp_model: DistributedDataParallel, enabled: bool = True, trace: bool = False) -> None:
        from torch.nn.parallel import DistributedDataParallel

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
        # Once it has ended.
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
        """What was found, as plain data that `ddpkit.rank.report(comm=...)` takes. Sizes in bytes, times in ms, medians of
        the last 200 passes; a pass is a backward that reduced gradients, and a step goes from one to the next.

        - `rank`, `world_size`, `backend`, `device`; `passes`, `bytes` of gradients in all; `note`: what could not be found.
        - `step_ms`; `backward_ms`, from the gradient of the output to the last bucket being ready; `comm_ms`, during which
          any bucket was under way; `exposed_ms`, of it after the last bucket was ready, when backward has only to wait;
          `hidden_share`, the rest of it; `sync_ms`, in which forward waited for rank 0's buffers.
        - `buckets`, each `bucket`, `bytes`, `ready_ms` and `back_ms` since backward began, `ms` between them.
        - `collectives`, each `name`, `count`, `bytes` that this rank put in, `ms` in all (None without `trace`); the list is
          None where torch records none.
        - `ddp`: DDP's own averages, sampled in the first ten steps and every hundredth: `forward_ms`, `backward_ms`, `comm_ms`,
          `overlap_ms`.
        - `ranks`, once the context has ended, each `rank`, `waited_ms` for the last one in a step, and `last_share`, of the
          passes in which the others waited for it; `straggler`, the rank for which they do as a rule, or None.
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
        """What this rank knows by itself."""
        import torch.distributed as dist

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
            "ddp": _ddps_own(self._model),
            "note": " ".join(filter(None, [*self._notes, note])),
        }

    def _leave(self) -> None:
        """Leave what this rank waited for in the job's store."""
        import torch.distributed as dist

        waits = [stats.waits(each, self._clock) for each in self._watch.passes]
        self._ranks = dist.get_process_group_ranks(self._model.process_group)
        self._store = dist.distributed_c10d._get_default_store()
        self._store.set(self._key(dist.get_rank()), json.dumps(waits))

    def _key(self, rank: int) -> str:
        return f"ddpkit/comm/{self._number}/{rank}"

    def _of_all_ranks(self) -> tuple[dict[int, list[tuple[float, float]]], str]:
        """By global rank and pass, what each waited for the others in ms: in forward for buffers, after backward for
        gradients. Nothing and a sentence where it is not there."""
        if not self._waited:
            keys = {rank: self._key(rank) for rank in self._ranks}
            try:
                self._store.wait(list(keys.values()), timedelta(seconds=OTHERS_WITHIN_S))
                self._waited = {rank: json.loads(self._store.get(key)) for rank, key in keys.items()}
            except RuntimeError:
                return (
                    {},
                    f"Who waits for whom is not known: not every rank left its CommProfiler within {OTHERS_WITHIN_S} s.",
                )
        return self._waited, ""

    def _start_tracing(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        if torch.autograd._profiler_enabled():
            # It would be ended by a second one, without a word.
            self._notes.append("torch's profiler runs already, so that this one could not trace the collectives.")
            return
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._tracing = profile(activities=[ProfilerActivity.CPU, *gpu])
        self._tracing.start()


# What torch says.


def _collectives(since_ns: int, spans: Any) -> tuple[list[dict[str, Any]] | None, str]:
    """Every collective since then by name, by the flight recorder and the profiler, and what is missing of it."""
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
    # The recorder forgets the oldest, and numbers all of them.
    lost = kept and len(entries) == kept and entries[0].get("record_id", 0) > 0
    note = f"Of the collectives only the last {kept} are counted." if lost else ""
    return [{"name": name, **row} for name, row in sorted(found.items())], note


def _recorded(since_ns: int) -> tuple[list[dict[str, Any]], int]:
    """The entries of torch's flight recorder since then, and how many it holds at all; (nothing, 0) where it has none."""
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return [], 0
    with contextlib.suppress(Exception):
        entries = sorted(json.loads(dump()).get("entries", []), key=lambda each: each["time_created_ns"])
        return [each for each in entries if each["time_created_ns"] >= since_ns], len(entries)
    return [], 0


def _spanned(spans: Any) -> dict[str, tuple[int, float]]:
    """Count and ms of the collectives among the profiler's spans; on a GPU, of those on the GPU."""
    if spans is None:
        return {}
    named = [each for each in spans.events() if each.name.startswith(("gloo:", "nccl:"))]
    on_gpu = [each for each in named if str(each.device_type).endswith("CUDA")]
    found: dict[str, tuple[int, float]] = {}
    for each in on_gpu or named:
        count, ms = found.get(each.name, (0, 0.0))
        found[each.name] = (count + 1, ms + each.time_range.elapsed_us() / 1000)
    return found


def _ddps_own(model: DistributedDataParallel) -> dict[str, float]:
    """The averages in DDP's logging data, which are in ns; {} where it has none yet."""
    data = model._get_ddp_logging_data()
    names = {
        "forward_ms": "avg_forward_compute_time",
        "backward_ms": "avg_backward_compute_time",
        "comm_ms": "avg_backward_comm_time",
        "overlap_ms": "avg_backward_compute_comm_overlap_time",
    }
    return {ours: round(data[theirs] / 1e6, 4) for ours, theirs in names.items() if data.get(theirs)}
