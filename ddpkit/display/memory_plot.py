"""Draws what filled the memory of each rank, against its budget, and how it grew from step to step.

From what `ddpkit.rank.memory_budget` wrote down in the ranks (`rank/memory/budget.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from ddpkit.runfolder import wire
from ddpkit.runfolder.ranks import Rank
from ddpkit.runfolder.stable import stable

from .picture import PAPER, Picture, legend, name_rows, new_figure
from .shown import ShownRun

REST = "activations and the rest"
_STYLES = (("#0072b2", ""), ("#56b4e9", "///"), ("#009e73", "..."), ("#cc79a7", "xxx"), ("#e69f00", "\\\\\\"))
_LOOKS = dict(zip((*wire.MEMORY_PARTS, REST), _STYLES, strict=True))
_LINES = (("#0072b2", "o", "-"), ("#e69f00", "s", "--"), ("#009e73", "^", ":"), ("#000000", "x", "-."))
BUDGET = "#d55e00"
MARGINS, LANE, GROWTH = 1.35, 0.42, 2.0
# Fewer steps than this make no line.
STEPS_FROM = 3

_RAN_OUT = re.compile(r"out of memory|DefaultCPUAllocator|MemoryError|bad_alloc")
# torch's words for what it was refused, on the CPU and on a GPU.
_REFUSED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMG]iB)")
_UNITS_MIB = {"bytes": 1 / (1 << 20), "KiB": 1 / 1024, "MiB": 1.0, "GiB": 1024.0}


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank's tensors, in MiB of 2**20 bytes: what of its peak is known, by `wire.MEMORY_PARTS`, and what
    was in use at the end of the steps that were written down. `budget_mib` is None where none was set; `refused_mib` is what
    was asked for last, beyond the peak."""

    rank: int
    budget_mib: float | None
    peak_mib: float
    parts_mib: dict[str, float]
    steps: tuple[int, ...]
    used_mib: tuple[float, ...]
    ran_out: bool
    refused_mib: float = 0.0

    @property
    def rest_mib(self) -> float:
        """What of the peak is none of the known parts: activations, batches, what an operation needs while it runs."""
        return max(0.0, self.peak_mib - sum(self.parts_mib.values()))

    @property
    def filled_by(self) -> str:
        """The name of the largest part."""
        found = {**self.parts_mib, REST: self.rest_mib}
        return max(found, key=lambda part: round(found[part]))


def memory(run: ShownRun) -> tuple[RankMemory, ...]:
    """What each rank of `run` wrote down of its memory, in order; one that never called `memory_budget` is not there."""
    return tuple(found for rank in run.ranks if (found := _read(rank)) is not None)


def _read(rank: Rank) -> RankMemory | None:
    # A rank that was killed while it wrote leaves a part of a line.
    written = wire.read_text(rank.folder / wire.MEMORY).splitlines()
    lines = [json.loads(line) for line in written if line.endswith("}")]
    # A second budget begins a new count.
    begin = max((i for i, line in enumerate(lines) if line["what"] == "budget"), default=None)
    if begin is None:
        return None
    lines = lines[begin:]
    last = lines[-1]
    failure = f"{rank.failure.type}: {rank.failure.message}" if rank.failure else ""
    refused = _REFUSED.search(failure)
    return RankMemory(
        rank.rank,
        last["budget_mib"],
        last["peak_mib"],
        {part: last["parts_mib"].get(part, 0.0) for part in wire.MEMORY_PARTS},
        tuple(line["step"] for line in lines if line["what"] == "step"),
        tuple(line["used_mib"] for line in lines if line["what"] == "step"),
        bool(_RAN_OUT.search(failure)),
        float(refused[1]) * _UNITS_MIB[refused[2]] if refused else 0.0,
    )


def draw(run: ShownRun) -> Picture:
    """The figure of `run`: what filled each rank's memory at its peak, its budget, and its growth where there were steps.

    Raises:
        LookupError: no rank of the job called `memory_budget`.
        ImportError: matplotlib is not installed.
    """
    found = memory(run)
    if not found:
        raise LookupError(
            f"{run.name}: no rank wrote down its memory; call ddpkit.rank.memory_budget(None) in the script, "
            "right after setup(), and launch it again."
        )
    steps = max(len(rank.used_mib) for rank in found) >= STEPS_FROM
    heights = [MARGINS + LANE * len(found), *([GROWTH] if steps else [])]
    figure = new_figure("the figure of the memory", sum(heights))
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_peaks(axes[0], found)
    if steps:
        _draw_growth(axes[1], found)
    legend(figure, run.name, _keys(axes[0]))
    return Picture(figure, _alt(run, found))


def _draw_peaks(axes: Any, found: Sequence[RankMemory]) -> None:
    """A bar for each rank, of what filled its memory at the peak, and a line at its budget."""
    widest = max(max(rank.peak_mib + rank.refused_mib, rank.budget_mib or 0.0) for rank in found)
    for y, rank in enumerate(found):
        left = 0.0
        for part, size in {**rank.parts_mib, REST: rank.rest_mib}.items():
            colour, hatch = _LOOKS[part]
            if size > 0:
                style = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0, "label": part}
                axes.barh([y], [size], 0.62, left, **style)
            left += size
        inside = left > widest / 4
        place = {"ha": "right" if inside else "left", "va": "center", "fontsize": 9}
        at = left + (-1 if inside else 1) * widest / 100
        axes.text(at, y, f"{rank.peak_mib:.0f} MiB", bbox=PAPER if inside else None, **place)
        if rank.refused_mib:
            look = {"color": "white", "edgecolor": BUDGET, "linestyle": "--", "label": "refused"}
            axes.barh([y], [rank.refused_mib], 0.62, left, **look)
            axes.text(
                left + rank.refused_mib + widest / 100,
                y,
                f"{rank.refused_mib:.0f} MiB refused",
                fontsize=9,
                va="center",
            )
        if rank.budget_mib is not None:
            axes.plot([rank.budget_mib] * 2, [y - 0.5, y + 0.5], color=BUDGET, linewidth=2.2)
            if y == 0 or rank.budget_mib != found[y - 1].budget_mib:
                axes.text(rank.budget_mib, y - 0.52, f"{rank.budget_mib:g}", color=BUDGET, fontsize=8.5, ha="center")
    names = {y: f"rank {rank.rank}{', ran out' if rank.ran_out else ''}" for y, rank in enumerate(found)}
    name_rows(axes, names, {y for y, rank in enumerate(found) if rank.ran_out}, "MiB of tensors at the peak")
    axes.tick_params(axis="y", labelsize=9)
    axes.set_ylim(len(found) - 0.5, -0.7)
    axes.set_xlim(0, widest * (1.25 if any(rank.refused_mib for rank in found) else 1.08))


def _draw_growth(axes: Any, found: Sequence[RankMemory]) -> None:
    """What was in use at the end of each step, and the budgets."""
    from matplotlib.ticker import MaxNLocator

    for rank, (colour, mark, line) in zip(found, cycle(_LINES), strict=False):
        look = {"color": colour, "marker": mark, "linestyle": line, "markersize": 5, "linewidth": 1.6}
        axes.plot(rank.steps, rank.used_mib, label=f"rank {rank.rank}", **look)
    for budget in {rank.budget_mib for rank in found if rank.budget_mib is not None}:
        axes.axhline(budget, color=BUDGET, linewidth=2.2)
    axes.set_ylim(0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("after step", loc="left", fontsize=9)
    axes.set_ylabel("MiB in use", fontsize=9)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8.5, frameon=False, ncols=4)


def _keys(axes: Any) -> list[Any]:
    """What the colours and the line mean."""
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    keys = dict(zip(labels, handles, strict=True))
    if axes.lines:
        keys["budget"] = Line2D([], [], color=BUDGET, linewidth=2.2, label="budget")
    return list(keys.values())


def _alt(run: ShownRun, found: Sequence[RankMemory]) -> str:
    """What the figure shows, in words that are the same in every run: sizes in MiB are not."""
    return stable(f"The memory of {run.name}. {'; '.join(map(_words, found))}.")


def _words(rank: RankMemory) -> str:
    """`rank 0 ran out of its budget of 80 MiB, filled mostly by activations and the rest`."""
    if rank.ran_out:
        what = f"ran out of its budget of {rank.budget_mib:g} MiB" if rank.budget_mib else "ran out"
        what += f" and was refused {rank.refused_mib:.0f} MiB more" if rank.refused_mib else ""
    else:
        what = f"stayed within its budget of {rank.budget_mib:g} MiB" if rank.budget_mib else "had no budget"
    return f"rank {rank.rank} {what}, filled mostly by {rank.filled_by}"
