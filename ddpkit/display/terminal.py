"""`TextSink`: rank-tagged lines as they come, for terminals, logs and `show="text"`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ddpkit.diagnosis.rows import text_lines

from .shown import ShownRun
from .sink import Line, Now, Sink

_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


class TextSink(Sink):
    """Prints `rank 1 │ text`, and `rank 1 ! text` for standard error; the verdict at the end. Drops no line."""

    wants_every_line = True

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True, markup=False, emoji=False)
        self._note, self._is_still = "", False

    def begin(self, run: ShownRun, stop: Callable[[], None]) -> None:
        self._console.print(f"{run.name}: {run.facts}", style="bold")

    def lines(self, batch: Sequence[Line]) -> None:
        """Print whole lines; one that is still open waits for its end."""
        from rich.text import Text

        for line in batch:
            if line.open:
                continue
            mark = "│" if line.stream == "stdout" else "!"
            tag = Text(f"rank {line.rank} {mark} ", style=_COLOURS[line.rank % len(_COLOURS)])
            self._console.print(tag.append(line.text, style="default"))

    def now(self, now: Now) -> None:
        """Print a new note; at a stall what was found, once, and that the job goes on, if it does."""
        said = [now.note] if now.note != self._note else []
        if now.still and not self._is_still:
            said += [now.still.sentence, *(f"  {line}" for line in text_lines(now.still.rows))]
        if self._is_still and not now.still and now.state == "running":
            said.append("The job goes on by itself.")
        for line in filter(None, said):
            self._console.print(f"ddpkit: {line}", style="italic")
        self._note, self._is_still = now.note, now.still is not None

    def end(self, run: ShownRun) -> None:
        self._console.print(str(run))
