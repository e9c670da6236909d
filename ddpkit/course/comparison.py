"""Draws the results of a bench: which of the three questions each remedy passed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ddpkit.display.picture import Picture, new_figure
from ddpkit.runfolder import steps

from .trial import Result

ASKED = ("ends well", "replicas equal", "as one process")
# Okabe and Ito's colours; the sign says the same without them.
YES, NO, NONE = ("#009e73", "✓"), ("#d55e00", "✗"), ("#d9d9d9", "–")
ROW, MARGIN, NAME_LETTERS = 0.42, 1.0, 60


def draw(title: str, results: Sequence[Result]) -> Picture:
    """The figure, with its alternative text; see `FixBench.compare`."""
    figure = new_figure("bench.compare()", MARGIN + ROW * len(results))
    figure.suptitle(title, fontsize=10)
    asked = figure.subplots()
    names = ["\n".join(textwrap.wrap(r.tried, NAME_LETTERS)) for r in results]
    for y, result in enumerate(results):
        found = result.outcome
        apart, off = found.replicas_apart, found.off_one_process if found.comparable else None
        for x, answer in enumerate((found.run.ok, _is_equal(apart), _is_equal(off))):
            colour, sign = {True: YES, False: NO, None: NONE}[answer]
            asked.scatter([x], [y], s=230, color=colour, marker="o" if answer else "s")
            asked.text(x, y, sign, ha="center", va="center", color="white" if answer is not None else "black")
    asked.set_xticks(range(len(ASKED)), ASKED, fontsize=8)
    asked.set_yticks(range(len(names)), names, fontsize=8)
    asked.set_xlim(-0.6, len(ASKED) - 0.4)
    asked.set_ylim(len(results) - 0.5, -0.5)
    asked.xaxis.tick_top()
    asked.spines[["top", "right", "left", "bottom"]].set_visible(False)
    asked.tick_params(length=0)
    return Picture(figure, f"{title}: " + "; ".join(f"{r.tried}: {r.outcome.words}" for r in results) + ".")


def _is_equal(difference: float | None) -> bool | None:
    return None if difference is None else steps.equal(difference)
