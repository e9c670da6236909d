"""Computes the results of `CommProfiler` from the times in `buckets.py`, and prints them as a table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from .buckets import Clock, Pass

MIB = 1 << 20
# A straggler comes last in at least this share of the passes, and costs the others at least this share of a step.
LAST_SHARE, WAIT_SHARE = 0.7, 0.2
# The first pass is a warm-up. With fewer than this many more, nobody is called a straggler.
WARM_PASSES, LEAST_PASSES = 1, 4


def timed(passes: Sequence[Pass], clock: Clock) -> dict[str, Any]:
    """The times of the passes with the same buckets as the last: DDP lays its buckets out anew after the first."""
    whole = [each for each in passes if each.ready and None not in each.back]
    alike = [each for each in whole if each.sizes == whole[-1].sizes]
    settled = alike[WARM_PASSES:] or alike
    shapes = [_shape(each, clock) for each in settled]
    ends = [each.ready[-1] for each in settled]
    steps = [clock.between_ms(before, after) for before, after in itertools.pairwise(ends)]
    rows = [
        {
            "bucket": i,
            "bytes": size,
            "ready_ms": _middle(shape["ready"][i] for shape in shapes),
            "back_ms": _middle(shape["back"][i] for shape in shapes),
            "ms": _middle(shape["back"][i] - shape["ready"][i] for shape in shapes),
        }
        for i, size in enumerate(settled[-1].sizes if settled else ())
    ]
    comm, exposed = (_middle(shape[what] for shape in shapes) for what in ("comm", "exposed"))
    return {
        "step_ms": _middle(steps),
        "backward_ms": _middle(max(shape["ready"]) for shape in shapes),
        "comm_ms": comm,
        "exposed_ms": exposed,
        "hidden_share": _middle(1 - shape["exposed"] / shape["comm"] for shape in shapes if shape["comm"] > 0),
        "sync_ms": _middle(waits(each, clock)[0] for each in settled),
        "buckets": rows,
    }


def _shape(one: Pass, clock: Clock) -> dict[str, Any]:
    """A pass in ms since its backward began; if that is not known, since its first bucket was ready."""
    begin = one.ready[0] if one.backward is None else one.backward
    ready = [clock.between_ms(begin, at) for at in one.ready]
    back = [clock.between_ms(begin, at) for at in one.back]
    comm, until = 0.0, -math.inf
    for start, end in sorted(zip(ready, back, strict=True)):
        comm += max(0.0, end - max(start, until))
        until = max(until, end)
    return {"ready": ready, "back": back, "comm": comm, "exposed": max(0.0, max(back) - max(ready))}


def waits(one: Pass, clock: Clock) -> tuple[float, float]:
    """The ms that this rank waited in a pass: for buffers, and for gradients after its last bucket was ready."""
    if not one.ready or None in one.back:
        return math.nan, math.nan
    shape = _shape(one, clock)
    return sum(clock.between_ms(start, end) for start, end in one.syncs), shape["exposed"]


def by_rank(waited: Mapping[int, Sequence[tuple[float, float]]], step_ms: float) -> dict[str, Any]:
    """Who waited, and for whom. All ranks leave a collective together, so the rank that spent the least time in it came
    last; the others waited for it as long as they spent more. So clocks of different ranks are never compared.

    Args:
        waited: by rank and pass, the two waits of `waits`.
    """
    # A rank that has seen fewer passes has missed the first ones.
    shortest = min(map(len, waited.values()), default=0)
    rows = zip(*(rank[len(rank) - shortest :] for rank in waited.values()), strict=True)
    passes = [row for row in rows if not any(math.isnan(x) for pair in row for x in pair)]
    lost = [_above_least(row) for row in passes[WARM_PASSES:] or passes]
    if not lost:
        return {"ranks": [], "straggler": None}
    last = [row.index(min(row)) for row in lost]
    found = [
        {"rank": rank, "waited_ms": _middle(row[i] for row in lost), "last_share": round(last.count(i) / len(last), 4)}
        for i, rank in enumerate(waited)
    ]
    often = max(found, key=lambda each: each["last_share"])
    cost_ms = max((each["waited_ms"] for each in found if each is not often), default=0.0)
    habit = len(lost) >= LEAST_PASSES and often["last_share"] >= LAST_SHARE
    return {"ranks": found, "straggler": often["rank"] if habit and cost_ms > WAIT_SHARE * step_ms > 0 else None}


def _above_least(row: Sequence[tuple[float, float]]) -> list[float]:
    syncs, exposed = zip(*row, strict=True)
    return [sync - min(syncs) + late - min(exposed) for sync, late in row]


def _middle(values: Iterable[float]) -> float:
    found = list(values)
    return round(median(found), 4) if found else 0.0


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
    waited = max(each["waited_ms"] for each in stats["ranks"])
    (share,) = (each["last_share"] for each in stats["ranks"] if each["rank"] == stats["straggler"])
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
        times = [f"{each[name]:.1f}" for name in ("ready_ms", "back_ms", "ms")]
        rows.append((str(each["bucket"]), f"{each['bytes'] / MIB:.2f}", *times))
    return _aligned(("bucket", "MiB", "ready at ms", "back at ms", "took ms"), rows)


def _collectives(stats: Mapping[str, Any]) -> str:
    rows = [(c["name"], str(c["count"]), _mib(c["bytes"]), _ms(c["ms"])) for c in stats["collectives"] or ()]
    return _aligned(("collective", "count", "MiB", "ms"), rows)


def _by_rank(stats: Mapping[str, Any]) -> str:
    rows = [(str(r["rank"]), f"{r['waited_ms']:.1f}", f"{r['last_share']:.0%}") for r in stats["ranks"]]
    return "\n".join(filter(None, [_aligned(("rank", "waits ms", "comes last in"), rows), _verdict(stats)]))


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:.2f}"


def _ms(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.1f}"


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right; "" without rows."""
    if not rows:
        return ""
    first, *others = (max(map(len, column)) for column in zip(head, *rows, strict=True))
    lines = []
    for name, *cells in (head, *rows):
        right = [cell.rjust(width) for cell, width in zip(cells, others, strict=True)]
        lines.append("  ".join([name.ljust(first), *right]))
    return "\n".join(lines)
