"""Draws the results of a bench: what each remedy passed, and its step's time against the plain run's."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from ddpkit.display.picture import Picture, new_figure
from ddpkit.runfolder import steps

from .trial import Result

ASKED = ("ends well", "replicas equal", "as one process")
# Okabe and Ito's colours; the sign and the hatching say the same without them.
YES, NO, NONE = ("#009e73", "✓"), ("#d55e00", "✗"), ("#d9d9d9", "–")
ROW, MARGIN, NAME_LETTERS = 0.42, 1.0, 34


def draw(title: str, results: Sequence[Result]) -> Picture:
    """The figure, with its alternative text; see `FixBench.compare`."""
    figure = new_figure("bench.compare()", MARGIN + ROW * len(results))
    figure.suptitle(title, fontsize=10)
    asked, times = figure.subplots(1, 2, sharey=True, width_ratios=(1.25, 1))
    names = ["\n".join(textwrap.wrap(r.tried, NAME_LETTERS)) for r in results]
    for y, result in enumerate(results):
        found = result.outcome
        apart, off = found.replicas_apart, found.off_one_process if found.comparable else None
        for x, answer in enumerate((found.run.ok, _is_equal(apart), _is_equal(off))):
            colour, sign = {True: YES, False: NO, None: NONE}[answer]
            asked.scatter([x], [y], s=230, color=colour, marker="o" if answer else "s")
            asked.text(x, y, sign, ha="center", va="center", color="white" if answer is not None else "black")
        _draw_time(times, y, result)
    asked.set_xticks(range(len(ASKED)), ASKED, fontsize=8)
    asked.set_yticks(range(len(names)), names, fontsize=8)
    asked.set_xlim(-0.6, len(ASKED) - 0.4)
    asked.set_ylim(len(results) - 0.5, -0.5)
    asked.xaxis.tick_top()
    times.axvline(1.0, color="#555555", linewidth=1, linestyle=":")
    times.set_xlabel("time of a step, against the plain run", fontsize=8)
    times.set_xlim(0, max([1.0, *(r.outcome.step_ratios[2] for r in results if r.outcome.step_ratios)]) * 1.25)
    times.tick_params(labelsize=8)
    for axes in (asked, times):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0)
    return Picture(figure, f"{title}: " + "; ".join(f"{r.tried}: {r.outcome.words}" for r in results) + ".")


def _draw_time(times: Any, y: int, result: Result) -> None:
    """A bar as long as the ratio, with the middle half of the steps' times as a whisker."""
    ratios = result.outcome.step_ratios
    if ratios is None:
        words = "did not finish" if not result.run.ok else "not measured"
        times.text(0.02, y, words, va="center", fontsize=8, bbox={"color": "white", "pad": 1})
        return
    low, median, high = ratios
    times.barh([y], [median], height=0.55, color="#56b4e9", hatch="" if result.cures else "///", edgecolor="white")
    times.plot([low, high], [y, y], color="#333333", linewidth=1.2)
    times.text(high, y, f"  {result.outcome.step_words}", va="center", fontsize=8)


def _is_equal(difference: float | None) -> bool | None:
    return None if difference is None else steps.equal(difference)
