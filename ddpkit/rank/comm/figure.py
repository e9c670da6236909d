"""Draws what `CommProfiler.stats()` tells: the buckets of a step beside its backward, and who waits for whom.

It takes the dict that a rank has reported, and so draws in a notebook too: no torch, and matplotlib only when asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpkit.display.picture import DPI, Picture

from .stats import MIB, verdict

# Okabe and Ito's colours, which the colour-blind tell apart; the hatching tells them apart in grey.
BACKWARD, HIDDEN, EXPOSED = ("#56b4e9", ""), ("#009e73", "..."), ("#e69f00", "////")
WAITS, LAST = ("#e69f00", "////"), ("#0072b2", "")
LABELS = {
    "backward computes": BACKWARD,
    "all-reduce, hidden behind backward": HIDDEN,
    "all-reduce that backward waits for": EXPOSED,
}
WIDTH, MARGINS, LANE = 8.0, 1.25, 0.34


def figure(stats: Mapping[str, Any]) -> Picture:
    """The figure of one rank's `CommProfiler.stats()`, as it was returned or as it was reported.

    Raises:
        LookupError: no bucket was timed.
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "the figure of the communication: matplotlib is not installed in this environment; pip install matplotlib."
        ) from None
    if not stats["buckets"]:
        raise LookupError(
            f"the figure of the communication: rank {stats['rank']} timed no bucket in {stats['passes']} backward passes. "
            + (stats["note"] or "Call it after some steps of the model inside the CommProfiler's `with` block.")
        )
    lanes, ranks = 1 + len(stats["buckets"]), len(stats["ranks"])
    heights = [MARGINS + LANE * lanes, *([MARGINS - 0.3 + LANE * ranks] if ranks else [])]
    drawn = Figure(figsize=(WIDTH, sum(heights)), dpi=DPI, layout="constrained")
    axes = drawn.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_step(axes[0], stats)
    if ranks:
        _draw_waits(axes[1], stats)
    _legend(drawn, stats)
    return Picture(drawn, _alt(stats))


def _draw_step(axes: Any, stats: Mapping[str, Any]) -> None:
    """A lane for backward and one for each bucket, from being ready to being back."""
    end = stats["backward_ms"]
    _bar(axes, 0, 0.0, end, BACKWARD)
    for y, bucket in enumerate(stats["buckets"], 1):
        ready, back = bucket["ready_ms"], bucket["back_ms"]
        _bar(axes, y, ready, min(back, end), HIDDEN)
        _bar(axes, y, max(ready, end), back, EXPOSED)
        axes.annotate(
            f"{bucket['ms']:.1f} ms", (back, y), (4, 0), textcoords="offset points", va="center", fontsize=8.5
        )
    axes.axvline(end, color="#000000", linewidth=0.8, linestyle=":")
    names = [f"bucket {bucket['bucket']}, {bucket['bytes'] / MIB:.2f} MiB" for bucket in stats["buckets"]]
    _frame(axes, ["backward", *names], f"ms since the backward of a step began, on rank {stats['rank']} (medians)")
    axes.set_xlim(0, 1.12 * max([end, *(bucket["back_ms"] for bucket in stats["buckets"])]))


def _draw_waits(axes: Any, stats: Mapping[str, Any]) -> None:
    """A bar for each rank: how long it waits in a step for the one that comes last."""
    for y, rank in enumerate(stats["ranks"]):
        _bar(axes, y, 0.0, rank["waited_ms"], LAST if rank["rank"] == stats["straggler"] else WAITS)
        _say(axes, rank["waited_ms"], y, f"{rank['waited_ms']:.1f} ms; last in {rank['last_share']:.0%} of the steps")
    late = [rank["rank"] == stats["straggler"] for rank in stats["ranks"]]
    names = [
        f"rank {rank['rank']}{', straggler' if is_late else ''}"
        for rank, is_late in zip(stats["ranks"], late, strict=True)
    ]
    _frame(axes, names, "ms that a rank waits for the last one in a step (medians)")
    for label, is_late in zip(axes.get_yticklabels(), late, strict=True):
        label.set_fontweight("bold" if is_late else "normal")
    # Room for the words behind the longest bar.
    axes.set_xlim(0, 1.5 * max([0.1, *(rank["waited_ms"] for rank in stats["ranks"])]))


def _bar(axes: Any, y: float, start: float, end: float, look: tuple[str, str]) -> None:
    if end > start:
        axes.barh([y], [end - start], 0.62, start, color=look[0], hatch=look[1], edgecolor="white", linewidth=0)


def _say(axes: Any, x: float, y: float, words: str) -> None:
    """Words to the right of a bar's end."""
    paper = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
    place = {"textcoords": "offset points", "va": "center", "fontsize": 8.5}
    axes.annotate(words, (x, y), (5, 0), bbox=paper, **place)


def _frame(axes: Any, names: list[str], words: str) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(words, loc="left", fontsize=9)
    axes.tick_params(axis="x", labelsize=9)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _legend(drawn: Any, stats: Mapping[str, Any]) -> None:
    """The title, and what the colours and hatchings mean."""
    from matplotlib.patches import Patch

    keys = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0, label=label)
        for label, (colour, hatch) in LABELS.items()
    ]
    title = (
        f"{stats['hidden_share']:.0%} of {stats['comm_ms']:.1f} ms of all-reduce hidden behind backward"
        f" · {stats['world_size']} ranks, {stats['backend']}"
    )
    place = {"loc": "outside upper left", "frameon": False, "borderaxespad": 0.3, "alignment": "left"}
    words = {"title": title, "title_fontproperties": {"size": 11, "weight": "bold"}, "fontsize": 8.5}
    drawn.legend(handles=keys, ncols=len(keys), handlelength=1.8, columnspacing=1.3, **words, **place)


def _alt(stats: Mapping[str, Any]) -> str:
    """What the figure shows, in words."""
    count = len(stats["buckets"])
    return (
        f"Over the time of one backward pass of rank {stats['rank']}: {count} bucket{'s' if count > 1 else ''}, "
        f"{stats['hidden_share']:.0%} of their all-reduce hidden behind backward. {verdict(stats)}"
    ).strip()
