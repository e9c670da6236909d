"""What the logs of a job say of its failure, as `scan` reads it and `causes` weighs it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ddpkit.diagnosis.pages import Page, Signature

from .deaths import End
from .lines import Line
from .progress import Progress
from .tracebacks import Raised


@dataclass(frozen=True)
class Hit:
    """A line that `signature` of `page` matches; `rank` wrote it, `named` are the ranks in it."""

    line: Line
    page: Page
    signature: Signature
    rank: int | None
    raised: bool = False
    named: tuple[int, ...] = ()


@dataclass
class Scan:
    """What one or several logs say of a failure.

    `cut`: where a traceback began that the end of its file cut off; `tail`: the last lines of each file; `lines` counts
    all lines; `launches`: the line at which the last launch in a file began, after another one that failed.
    """

    hits: list[Hit] = field(default_factory=list)
    raised: list[Raised] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    cut: list[tuple[str, int]] = field(default_factory=list)
    tail: dict[str, tuple[Line, ...]] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    launches: dict[str, int] = field(default_factory=dict)
    lines: int = 0
    seen: int = 0

    @property
    def last_end(self) -> int:
        """Where the last process ended with an error."""
        return max((end.line.order for end in self.ends if end.exitcode), default=-1)

    def of_launch(self, last: bool) -> Scan:
        """What the last launch in each file said, or all before it said."""
        return replace(
            self,
            hits=[hit for hit in self.hits if self._is_of(hit.line.file, hit.line.number, last)],
            raised=[one for one in self.raised if self._is_of(one.line.file, one.line.number, last)],
            ends=[end for end in self.ends if self._is_of(end.line.file, end.line.number, last)],
            cut=[(file, number) for file, number in self.cut if self._is_of(file, number, last)],
            progress=self.progress if last else Progress(),
        )

    def _is_of(self, file: str, number: int, last: bool) -> bool:
        return (number >= self.launches.get(file, 0)) is last

    def went_on(self, line: Line) -> bool:
        """Whether the job went on after that line, so that the line did not end it."""
        return self.progress.went_on(line, self.last_end)
