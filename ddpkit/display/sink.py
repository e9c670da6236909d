"""What a running job tells the view or the terminal that shows it: lines and states, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .rows import Standstill
from .shown import ShownRun


@dataclass(frozen=True, slots=True)
class Line:
    """One line that a rank wrote. `open`: not ended by a newline yet; the next line of that rank and stream replaces it.

    It was written at `written_ns`; unless that is known to be `exact`, at that moment or before it.
    """

    rank: int
    stream: str
    seq: int
    written_ns: int
    text: str
    attempt: int = 0
    open: bool = False
    exact: bool = True


@dataclass(frozen=True, slots=True)
class RankNow:
    """A rank at this moment; `kind` is starting, running, silent, ending, passed, failed, consequence or ended."""

    rank: int
    kind: str
    words: str
    rss_mib: float | None = None
    device: str = ""
    device_mib: float | None = None
    attempt: int = 0
    node: str = ""


@dataclass(frozen=True, slots=True)
class Now:
    """The job at this moment; `state` is running, queued or stopping.

    `skipped` counts display lines per rank that were never passed on; `still` is what was found when nothing moved, None
    while the job goes on.
    """

    state: str
    elapsed_s: float
    ranks: tuple[RankNow, ...]
    skipped: dict[int, int]
    note: str = ""
    still: Standstill | None = None


class Sink:
    """Receives a running job, from the watching thread; must not block it."""

    def begin(self, run: ShownRun, stop: Callable[[], None]) -> None:
        """The job starts; `stop` may be called from any thread and returns at once."""

    def count_from(self, began_ns: int) -> None:
        """The job began before `begin` was called: times count from then."""

    def lines(self, batch: Sequence[Line]) -> None:
        """New lines, in order within each rank and stream."""

    def now(self, now: Now) -> None:
        """The state of every rank, a few times a second."""

    def end(self, run: ShownRun) -> None:
        """The job has ended and `run` is complete."""


class Silence(Sink):
    """Shows nothing: `show=False`."""
