"""Computes the results of `CommProfiler` from the times in `buckets.py`, and prints them as a table."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .buckets import Clock, Pass

MIB = 1 << 20
# A straggler comes last in at least this share of the passes, and costs the others at least this share of a step.
LAST_SHARE, WAIT_SHARE = 0.7, 0.2
# The first pass is a warm-up. With fewer than this many more, nobody is called a straggler.
WARM_PASSES, LEAST_PASSES = 1, 4


def timed(passes: Sequence[Pass], clock: Clock) -> dict[str, Any]:
    """The times of the passes with the same buckets as the last: DDP lays its buckets out anew after the first."""
    settled = _settled(passes)
    found = defaultdict[str, list[float]](list)
    buckets = []
    for one in settled:
        ready, back = _since_backward(one, clock)
        sync_ms, exposed_ms = waits(one, clock)
        comm_ms = _under_way(ready, back)
        buckets.append((ready, back))
        found["backward_ms"].append(max(ready))
        found["comm_ms"].append(comm_ms)
        found["exposed_ms"].append(exposed_ms)
        if comm_ms > 0:
            found["hidden_share"].append(1 - exposed_ms / comm_ms)
        found["sync_ms"].append(sync_ms)
    for before, after in itertools.pairwise(settled):
        found["step_ms"].append(clock.between_ms(before.ready[-1], after.ready[-1]))
    names = ("step_ms", "backward_ms", "comm_ms", "exposed_ms", "hidden_share", "sync_ms")
    rows = _by_bucket(settled[-1].sizes, np.array(buckets)) if settled else []
    return {**{name: _middle(found[name]) for name in names}, "buckets": rows}


def _settled(passes: Sequence[Pass]) -> list[Pass]:
    whole = [each for each in passes if each.ready and None not in each.back]
    alike = [each for each in whole if each.sizes == whole[-1].sizes]
    return alike[WARM_PASSES:] or alike


def _by_bucket(sizes: Sequence[int], times: np.ndarray) -> list[dict[str, Any]]:
    """`times` in ms by pass, ready or back, and bucket."""
    rows = []
    for bucket, size in enumerate(sizes):
        ready, back = times[:, 0, bucket], times[:, 1, bucket]
        middles = {"ready_ms": _middle(ready), "back_ms": _middle(back), "ms": _middle(back - ready)}
        rows.append({"bucket": bucket, "bytes": size, **middles})
    return rows


def _since_backward(one: Pass, clock: Clock) -> tuple[list[float], list[float]]:
    """When each bucket was ready and back, in ms since backward began; if that is not known, since the first was ready."""
    begin = one.ready[0] if one.backward is None else one.backward
    ready, back = [], []
    for start, end in zip(one.ready, one.back, strict=True):
        ready.append(clock.between_ms(begin, start))
        back.append(clock.between_ms(begin, end))
    return ready, back


def _under_way(ready: Sequence[float], back: Sequence[float]) -> float:
    """The ms in which any bucket was between ready and back."""
    ms, until = 0.0, -math.inf
    for start, end in sorted(zip(ready, back, strict=True)):
        ms += max(0.0, end - max(start, until))
        until = max(until, end)
    return ms


def waits(one: Pass, clock: Clock) -> tuple[float, float]:
    """The ms that this rank waited in a pass: for buffers, and for gradients after its last bucket was ready."""
    if not one.ready or None in one.back:
        return math.nan, math.nan
    ready, back = _since_backward(one, clock)
    return sum(itertools.starmap(clock.between_ms, one.syncs)), max(0.0, max(back) - max(ready))


def by_rank(waited: Mapping[int, Sequence[tuple[float, float]]], step_ms: float) -> dict[str, Any]:
    """Who waited, and for whom. All ranks leave a collective together, so the rank that spent the least time in it came
    last; the others waited for it as long as they spent more. So clocks of different ranks are never compared.

    Args:
        waited: by rank and pass, the two waits of `waits`.
    """
    lost = _above_least(list(waited.values()))
    if not lost.size:
        return {"ranks": [], "straggler": None}
    last = lost.argmin(axis=0)
    found = []
    for place, rank in enumerate(waited):
        share = round(float(np.mean(last == place)), 4)
        found.append({"rank": rank, "waited_ms": _middle(lost[place]), "last_share": share})
    often = max(found, key=lambda each: each["last_share"])
    cost_ms = max((each["waited_ms"] for each in found if each is not often), default=0.0)
    habit = len(last) >= LEAST_PASSES and often["last_share"] >= LAST_SHARE
    return {"ranks": found, "straggler": often["rank"] if habit and cost_ms > WAIT_SHARE * step_ms > 0 else None}


def _above_least(waited: Sequence[Sequence[tuple[float, float]]]) -> np.ndarray:
    """By rank and pass, the ms that a rank waited longer than the one that waited least."""
    # A rank that has seen fewer passes has missed the first ones.
    shortest = min(map(len, waited), default=0)
    if not shortest:
        return np.empty(0)
    every = np.array([rank[len(rank) - shortest :] for rank in waited])
    known = every[:, ~np.isnan(every).any(axis=(0, 2))]
    settled = known[:, WARM_PASSES:] if known.shape[1] > WARM_PASSES else known
    return (settled - settled.min(axis=0)).sum(axis=2)


def _middle(values: Sequence[float] | np.ndarray) -> float:
    return round(float(np.median(values)), 4) if len(values) else 0.0


def table(stats: Mapping[str, Any]) -> str:
    """`stats()` of a profiler as aligned text."""
    blocks = [_headline(stats), _buckets(stats), _collectives(stats), _by_rank(stats), stats["note"]]
    return "\n\n".join(filter(None, blocks))


def _verdict(stats: Mapping[str, Any]) -> str:
    """One sentence on who holds up the others; "" if that is not known."""
    if not stats["ranks"]:
        return ""
    if stats["straggler"] is None:
        return "No rank holds up the others as a rule."
    waited = share = 0.0
    for each in stats["ranks"]:
        waited = max(waited, each["waited_ms"])
        if each["rank"] == stats["straggler"]:
            share = each["last_share"]
    return (
        f"Rank {stats['straggler']} comes last in {share:.0%} of the steps, and the others wait up to {waited:.1f} ms for it, "
        f"{waited / stats['step_ms']:.0%} of a step."
    )


def _headline(stats: Mapping[str, Any]) -> str:
    per_pass = stats["bytes"] / MIB / max(1, stats["passes"])
    lines = [
        f"rank {stats['rank']} of {stats['world_size']}, {stats['backend']} on {stats['device']}: {stats['passes']} backward "
        f"passes with gradients of {per_pass:.2f} MiB, {stats['step_ms']:.1f} ms a step"
    ]
    if stats["buckets"]:
        lines.append(
            f"backward {stats['backward_ms']:.1f} ms; all-reduce {stats['comm_ms']:.1f} ms, {stats['hidden_share']:.0%} of it "
            f"hidden behind backward, {stats['exposed_ms']:.1f} ms after it; waits for buffers {stats['sync_ms']:.1f} ms"
        )
    return "\n".join(lines)


def _buckets(stats: Mapping[str, Any]) -> str:
    rows = []
    for each in stats["buckets"]:
        times = map(_ms, (each["ready_ms"], each["back_ms"], each["ms"]))
        rows.append((str(each["bucket"]), _mib(each["bytes"]), *times))
    return _aligned(("bucket", "MiB", "ready at ms", "back at ms", "took ms"), rows)


def _collectives(stats: Mapping[str, Any]) -> str:
    rows = [(c["name"], str(c["count"]), _mib(c["bytes"]), _ms(c["ms"])) for c in stats["collectives"] or ()]
    return _aligned(("collective", "count", "MiB", "ms"), rows)


def _by_rank(stats: Mapping[str, Any]) -> str:
    rows = [(str(r["rank"]), _ms(r["waited_ms"]), f"{r['last_share']:.0%}") for r in stats["ranks"]]
    return "\n".join(filter(None, [_aligned(("rank", "waits ms", "comes last in"), rows), _verdict(stats)]))


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:.2f}"


def _ms(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.1f}"


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right; "" without rows."""
    if not rows:
        return ""
    lines = [""] * (len(rows) + 1)
    for place, column in enumerate(zip(head, *rows, strict=True)):
        width = max(map(len, column))
        for at, cell in enumerate(column):
            lines[at] += f"  {cell:>{width}}" if place else f"{cell:<{width}}"
    return "\n".join(lines)
