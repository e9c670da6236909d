"""Draws a run's ranks over time: what each computed, where it waited for others, when it fell silent, and how it ended.

Built from a run's records alone. gloo writes down when a rank joins a collective and never when it comes back; it cannot
come back before the last member has joined, so a wait is drawn until then.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddpkit.runfolder.calls import Collective
from ddpkit.runfolder.ranks import Rank
from ddpkit.runfolder.stable import stable
from ddpkit.verdict.places import BUSY_FROM, place_of

from .picture import PAPER, Picture, legend, name_rows, new_figure
from .rows import Row, stood_still
from .shown import ShownRun

Kind = Literal["starting", "unrecorded", "computing", "waiting", "stalled", "silent"]
End = Literal["passed", "failed", "ended", "running"]

MARGINS, LANE = 1.15, 0.4
# About what the lanes and one letter take, in pixels.
LANE_PX, LETTER_PX = 690, 6.6
MOST_WORDS = 44
# Hatching takes time to draw, and room to be seen.
HATCHED_FROM = 0.004

# The watcher asks a silent rank about once a second: a silence may have begun so much earlier than it was noticed.
NOTICED_WITHIN_NS = 1_600_000_000

_LOOKS: dict[Kind, tuple[str, str, str, str]] = {
    "starting": ("starts", "#d9d9d9", "", "#ffffff"),
    "unrecorded": ("not recorded", "#efefef", "", "#bbbbbb"),
    "computing": ("computes", "#56b4e9", "", "#ffffff"),
    "waiting": ("waits for others", "#e69f00", "////", "#ffffff"),
    "stalled": ("waits in vain", "#d55e00", "xxx", "#f3c7a8"),
    "silent": ("silent", "#ffffff", "....", "#555555"),
}
_MARKS: dict[End, tuple[str, str, str]] = {
    "passed": ("passed", "#009e73", "o"),
    "failed": ("failed", "#000000", "X"),
    "ended": ("was ended", "#ffffff", "s"),
    "running": ("still runs", "#ffffff", ">"),
}


@dataclass(frozen=True)
class Span:
    """What a rank did from one moment to another, in seconds since the first rank started; `words` name the collective."""

    kind: Kind
    from_s: float
    to_s: float
    words: str = ""


@dataclass(frozen=True)
class Lane:
    """One rank over time. `end` is how it ended, at `end_s`; `words` say it; `at_fault` as the verdict has it."""

    rank: int
    spans: tuple[Span, ...]
    end: End
    words: str
    end_s: float
    at_fault: bool = False


def lanes(ranks: Sequence[Rank], table: Sequence[Row], now_ns: int | None = None) -> tuple[Lane, ...]:
    """What each rank did over time; `table` says where it is and who is at fault, `now_ns` is the end of those that run."""
    begin = min((rank.started_ns for rank in ranks if rank.started_ns is not None), default=0)
    joins = _joins(ranks)
    found = []
    for rank, row in zip(ranks, table, strict=True):
        end = _ended_ns(rank, now_ns)
        # A rank that was killed or stopped, or held the GIL, could not tell what it had joined.
        works: Kind = "unrecorded" if joins and rank.joining and not rank.collectives else "computing"
        moments = _moments(rank, _waits(rank, ranks, joins, end), end, works, row.where)
        spans = tuple(Span(k, (a - begin) / 1e9, (b - begin) / 1e9, words) for k, a, b, words in moments if b > a)
        found.append(Lane(rank.rank, spans, *_ending(rank), max(0.0, (end - begin) / 1e9), row.tone == "fault"))
    return tuple(found)


# Kind, from, to in nanoseconds, words.
_Moment = tuple[Kind, int, int, str]
_Joins = Mapping[tuple[int, str, int], Mapping[int, int]]


def _ended_ns(rank: Rank, now_ns: int | None) -> int:
    if rank.failure is not None and rank.failure.at_ns:
        return rank.failure.at_ns
    seen_ns = rank.look.at_ns if rank.look else rank.started_ns
    return rank.finished_ns or rank.ended_ns or now_ns or seen_ns or 0


def _joins(ranks: Sequence[Rank]) -> _Joins:
    """When each rank joined each collective."""
    found: dict[tuple[int, str, int], dict[int, int]] = {}
    for rank in ranks:
        for collective in rank.collectives:
            found.setdefault(collective.key, {})[rank.rank] = collective.at_ns
    return found


def _moments(rank: Rank, waits: Iterable[_Moment], end: int, works: Kind, where: str) -> list[_Moment]:
    """What one rank did, in order and without gaps. Where waits overlap, as those of DDP's buckets do, the next cuts the last."""
    if rank.started_ns is None:
        return []
    at = over = rank.joining.at_ns if rank.joining else rank.started_ns
    found: list[_Moment] = [("starting", rank.started_ns, min(at, end), "")]
    in_order = sorted(waits, key=lambda wait: wait[1])
    for wait, following in zip(in_order, [*in_order[1:], None], strict=False):
        kind, joined, until, words = wait
        over = max(over, until)
        until = min(over, following[1]) if following else over
        found += [(works, at, joined, ""), (kind, max(at, joined), until, words)]
        at = max(at, until)
    if rank.look is None or not stood_still(rank):
        return [*found, (works, at, end, "")]
    if rank.look.busy >= BUSY_FROM:
        return [*found, (works, at, end, where)]
    quiet = min(end, rank.look.at_ns - int(rank.look.silent_s * 1e9))
    if quiet - at < NOTICED_WITHIN_NS:
        quiet = at
    return [*found, (works, at, quiet, ""), ("silent", quiet, end, where)]


def _waits(rank: Rank, ranks: Sequence[Rank], joins: _Joins, end: int) -> Iterable[_Moment]:
    """From each join of this rank until the last member has joined; in vain where that never came, or was no use."""
    if rank.joining:
        last = max(r.joining.at_ns for r in ranks if r.joining)
        # Where any rank has joined a collective, the group had come up.
        in_vain = not joins and place_of(rank).kind == "joining"
        yield _wait(rank.joining.at_ns, None if in_vain else last, end, "init_process_group")
    for collective in rank.collectives:
        last_join = _last_join(collective, ranks, joins)
        if collective is not rank.collectives[-1] or rank.exitcode == 0:
            # It came back from this one, or never waited for it; some member may have left no record.
            last_join = last_join or collective.at_ns
        elif rank.role == "consequence" if rank.failure else not collective.done:
            last_join = last_join if last_join and last_join > end else None
        yield _wait(collective.at_ns, last_join, end, collective.name)


def _last_join(collective: Collective, ranks: Sequence[Rank], joins: _Joins) -> int | None:
    """When the last member joined, as far as is recorded; None where a member that left a record never did."""
    joined = joins[collective.key]
    members = collective.ranks or tuple(r.rank for r in ranks)
    recorded = {r.rank for r in ranks if r.collectives}
    if any(member in recorded and member not in joined for member in members):
        return None
    return max(joined.values())


def _wait(joined: int, last: int | None, end: int, words: str) -> _Moment:
    in_vain = last is None or last > end
    return ("stalled" if in_vain else "waiting", joined, end if last is None else min(last, end), words)


def _ending(rank: Rank) -> tuple[End, str]:
    """How it ended, and `ValueError, exit code 1`, `SIGKILL` or `exit code 0`."""
    if rank.exitcode is None:
        return "running", ""
    if rank.exitcode == 0:
        return "passed", "exit code 0"
    failure = f"{stable(rank.failure.type)}, " if rank.failure else ""
    words = rank.signal or f"{failure}exit code {rank.exitcode}"
    return "failed" if rank.failure or not rank.told else "ended", words


def draw(run: ShownRun) -> Picture:
    """The figure of `run`; see `Run.plot`."""
    table = run.rows
    found = lanes(run.ranks, table, time.time_ns() if run.state == "running" else None)
    total = max((lane.end_s for lane in found), default=1.0) or 1.0
    figure = new_figure("run.plot()", MARGINS + LANE * max(1, len(found)))
    axes = figure.subplots()
    axes.set_xlim(0, max([total, *(lane.end_s / (1 - len(lane.words) * LETTER_PX / LANE_PX - 0.03) for lane in found)]))
    for lane in found:
        _draw_lane(axes, lane, total)
    _label(axes, found, total)
    legend(figure, f"{run.name} → {run.state.replace('_', ' ')}", _keys(found))
    return Picture(figure, _alt(run, table))


def _draw_lane(axes: Any, lane: Lane, total: float) -> None:
    for kind, (_, colour, hatch, edge) in _LOOKS.items():
        spans = [s for s in lane.spans if s.kind == kind]
        for wide in (False, True):
            bars = [(s.from_s, s.to_s - s.from_s) for s in spans if (s.to_s - s.from_s > HATCHED_FROM * total) is wide]
            style = {"hatch": hatch, "edgecolor": edge, "linewidth": 0.6} if wide else {"linewidth": 0}
            axes.broken_barh(bars, (lane.rank - 0.33, 0.66), facecolor=colour, **style)
    for span in lane.spans:
        _name(axes, span, lane.rank)
    _, colour, marker = _MARKS[lane.end]
    look = {"markersize": 9, "markerfacecolor": colour, "markeredgecolor": "black", "clip_on": False}
    axes.plot([lane.end_s], [lane.rank], marker=marker, zorder=5, **look)
    beside = {"xytext": (9, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
    axes.annotate(lane.words, (lane.end_s, lane.rank), annotation_clip=False, **beside)


def _name(axes: Any, span: Span, rank: int) -> None:
    """Write a span's words into it, if there is room."""
    room = int((span.to_s - span.from_s) / axes.get_xlim()[1] * LANE_PX / LETTER_PX) - 2
    fits = len(span.words) <= room or room >= MOST_WORDS // 2
    words = textwrap.shorten(span.words, max(1, min(room, MOST_WORDS)), placeholder=" …") if fits else ""
    if words:
        middle = (span.from_s + span.to_s) / 2
        axes.text(middle, rank, words, ha="center", va="center", fontsize=8.5, bbox=PAPER, zorder=4, parse_math=False)


def _label(axes: Any, found: Sequence[Lane], total: float) -> None:
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= total])
    axes.spines["bottom"].set_bounds(0, total)
    axes.set_ylim(max((lane.rank for lane in found), default=0) + 0.6, -0.6)
    names = {lane.rank: f"rank {lane.rank}{', at fault' if lane.at_fault else ''}" for lane in found}
    at_fault = {lane.rank for lane in found if lane.at_fault}
    name_rows(axes, names, at_fault, "seconds since the first rank started")


def _keys(found: Sequence[Lane]) -> list[Any]:
    """What the colours, hatchings and marks mean, of those that are there."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds, ends = {span.kind for lane in found for span in lane.spans}, {lane.end for lane in found}
    keys: list[Any] = [
        Patch(facecolor=colour, hatch=hatch, edgecolor=edge, linewidth=0.6, label=label)
        for kind, (label, colour, hatch, edge) in _LOOKS.items()
        if kind in kinds
    ]
    keys += [
        Line2D([], [], linestyle="", marker=marker, markerfacecolor=colour, markeredgecolor="black", label=label)
        for end, (label, colour, marker) in _MARKS.items()
        if end in ends
    ]
    return keys


def _alt(run: ShownRun, table: Sequence[Row]) -> str:
    """What the figure shows, in words that are the same in every run."""
    said = "; ".join(f"rank {row.rank} {row.words}{f', {row.where}' if row.where else ''}" for row in table)
    return stable(f"The ranks of {run.name} over time. State: {run.state.replace('_', ' ')}. {said}.")
