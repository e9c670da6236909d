"""A job as rank-tagged text: `TextSink` in terminals and logs, `KernelText` for `show="text"` in a kernel."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .lane_feed import GAP, STREAMS, Row
from .lanes import LaneSink
from .shown import ShownRun
from .sink import Line, Now, Sink
from .text import text_lines

_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


class Notes:
    """What is said between the lines: a new note; at a stall what was found, once, and that the job goes on, if it does."""

    def __init__(self) -> None:
        self._note, self._is_still = "", False

    def new(self, now: Now) -> list[str]:
        """What `now` says that was not said yet."""
        said = [now.note] if now.note and now.note != self._note else []
        if now.still and not self._is_still:
            said += [now.still.sentence] if now.still.sentence else []
            said += [f"  {line}" for line in text_lines(now.still.rows)]
        if self._is_still and not now.still and now.state == "running":
            said.append("The job goes on by itself.")
        self._note, self._is_still = now.note, now.still is not None
        return [f"ddpkit: {line}" for line in said]


class TextSink(Sink):
    """Prints `rank 1 │ text`, and `rank 1 ! text` for standard error; the verdict at the end. Drops no line."""

    wants_every_line = True

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True, markup=False, emoji=False)
        self._notes = Notes()

    def begin(self, run: ShownRun, stop: Callable[[], None]) -> None:
        self._console.print(f"{run.name}: {run.facts}", style="bold")

    def lines(self, batch: Sequence[Line]) -> None:
        """Print whole lines; one that is still open waits for its end."""
        from rich.text import Text

        for line in batch:
            if not line.open:
                tag = Text(_tag(line.rank, STREAMS[line.stream]), style=_COLOURS[line.rank % len(_COLOURS)])
                self._console.print(tag.append(line.text, style="default"))

    def now(self, now: Now) -> None:
        for line in self._notes.new(now):
            self._console.print(line, style="italic")

    def end(self, run: ShownRun) -> None:
        self._console.print(str(run))


class KernelText(LaneSink):
    """The same text, plain, in the output of the cell that launches: one message for a batch. Thins a flood, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self._notes, self._said = Notes(), list[str]()

    def begin(self, run: ShownRun, stop: Callable[[], None]) -> None:
        self._write = _writer()
        self._tell([f"{run.name}: {run.facts}"])
        super().begin(run, stop)

    def now(self, now: Now) -> None:
        with self._lock:
            self._said += self._notes.new(now)
        super().now(now)

    def end(self, run: ShownRun) -> None:
        super().end(run)
        self._tell([str(run)])

    def _send_batch(self, chars: float) -> None:
        with self._lock:
            lanes = [[(row, rank) for row in rows] for rank, rows in self._take(chars)]
            said, self._said = self._said, []
        # By time, and each lane in its own order.
        in_order = heapq.merge(*lanes, key=lambda told: told[0][1])
        self._tell([_text(rank, row) for row, rank in in_order if not row[4]] + said)

    def _tell(self, lines: Sequence[str]) -> None:
        """Send; a kernel that has gone must not disturb the job."""
        try:
            if lines and not self._gone:
                self._write("\n".join(lines) + "\n")
        except Exception:
            self._gone = True


def _tag(rank: int, stream: int) -> str:
    return f"rank {rank} {'!' if stream else '│'} "


def _text(rank: int, row: Row) -> str:
    """One row of a lane as text; for a gap, how much is left out."""
    if row[0] != GAP:
        return _tag(rank, row[0]) + row[2]
    lines = "1 line is" if row[2] == 1 else f"{row[2]:,} lines are"
    return f"rank {rank} … {lines} not shown here; all are in run.ranks[{rank}].stdout"


def _writer() -> Callable[[str], None]:
    """What writes to the output of this cell, whichever cell runs when it is called: one stream message a call.

    ipykernel's own stream keeps text for up to 0.2 s, and gives what a thread writes to the cell that runs by then.
    """
    out: Any = sys.stdout
    out.flush()
    if not hasattr(out, "pub_thread"):
        # %%capture and redirect_stdout put an ordinary file in its place.
        return lambda text: print(text, end="", file=out, flush=True)
    parent = out.parent_header
    return lambda text: out.session.send(
        out.pub_thread, "stream", {"name": out.name, "text": text}, parent=parent, ident=out.topic
    )
