"""A figure as notebooks show it: a PNG with alternative text. Every room that draws, in either wing, gives one."""

from __future__ import annotations

import io
from typing import Any

DPI = 100


class Picture:
    """The figure: a PNG with alternative text in a notebook. `figure` is matplotlib's own, `save(path)` writes it."""

    def __init__(self, figure: Any, alt: str) -> None:
        self.figure = figure
        self.alt = alt

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        # `alt` stands where IPython's own Image puts it and nbconvert reads it; a text form that varies would break nbval.
        return {"image/png": self.png(), "text/plain": self.alt}, {"image/png": {"alt": self.alt, "width": 800}}

    def __repr__(self) -> str:
        return self.alt

    def png(self, dpi: int = 2 * DPI) -> bytes:
        """The figure as a PNG: 800 px wide at 100 dpi, twice that by default, for screens with narrow pixels."""
        picture = io.BytesIO()
        self.figure.savefig(picture, format="png", dpi=dpi)
        return picture.getvalue()

    def save(self, path: Any) -> None:
        """Write the figure to `path`; its ending says in which format."""
        self.figure.savefig(path, dpi=2 * DPI, metadata={"Title": self.alt})
