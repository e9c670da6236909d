"""A figure as notebooks show it, a PNG with alternative text, and what all figures share.

Their colours are Okabe and Ito's, which the colour-blind tell apart; hatching tells them apart in grey.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

DPI = 100
WIDTH = 8.0
# Behind words that are written over a drawing.
PAPER = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.92}


class Picture:
    """The figure: a PNG with alternative text in a notebook. `figure` is matplotlib's own, with its `savefig`."""

    def __init__(self, figure: Any, alt: str) -> None:
        self.figure = figure
        self.alt = alt

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        # `alt` is where IPython's own Image puts it and nbconvert reads it; a text form that varies would break nbval.
        return {"image/png": self.png(), "text/plain": self.alt}, {"image/png": {"alt": self.alt, "width": 800}}

    def __repr__(self) -> str:
        return self.alt

    def png(self, dpi: int = 2 * DPI) -> bytes:
        """The figure as a PNG: 800 px wide at 100 dpi, twice that by default, for screens with narrow pixels."""
        picture = io.BytesIO()
        self.figure.savefig(picture, format="png", dpi=dpi)
        return picture.getvalue()


def new_figure(asked: str, height: float) -> Any:
    """An empty matplotlib figure, 8 by `height` inches.

    Raises:
        ImportError: matplotlib is not installed; `asked`, what was asked for, opens the sentence.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        missing = "matplotlib is not installed in this environment; pip install matplotlib."
        raise ImportError(f"{asked}: {missing}") from None
    return Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")


def name_rows(axes: Any, names: Mapping[int, str], bold: set[int], words: str) -> None:
    """Name the rows at these heights, those in `bold` in bold; `words` say what is measured along the x axis."""
    axes.set_yticks(list(names), list(names.values()))
    for y, label in zip(names, axes.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if y in bold else "normal")
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9)
    axes.set_xlabel(words, loc="left", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)


def legend(figure: Any, title: str, keys: Sequence[Any]) -> None:
    """Put the title and the `keys` (matplotlib's handles, each with its label) above all axes."""
    place = {"loc": "outside upper left", "frameon": False, "borderaxespad": 0.3, "alignment": "left"}
    words = {"title": title, "title_fontproperties": {"size": 11, "weight": "bold"}, "fontsize": 8.5}
    made = figure.legend(handles=keys, ncols=len(keys), handlelength=1.6, columnspacing=1.1, **words, **place)
    made.get_title().set_parse_math(False)
