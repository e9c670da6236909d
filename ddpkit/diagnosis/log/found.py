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
    """A line that `signature` of `page` matches; `rank` wrote it, `named` are the ranks in it. `order` counts the lines read."""

    line: Line
    order: int
    page: Page
    signature: Signature
    rank: int | None
    raised: bool = False
    named: tuple[int, ...] = ()


@dataclass
class Scan:
    """What one or several logs say of a failure. Lines are numbered in the order in which they were read, over all logs.

    `explained`: exceptions of which the catalog knows the second line of the message; `cut`: where a traceback began that the
    end of its file cut off; `tail`: the last lines of each file; `lines` counts all lines; `launches`: the order and the line
    at which the last launch in a file began, after another one that failed.
    """

    hits: list[Hit] = field(default_factory=list)
    raised: list[tuple[int, Raised]] = field(default_factory=list)
    explained: set[int] = field(default_factory=set)
    ends: list[tuple[int, End]] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    cut: list[tuple[str, int]] = field(default_factory=list)
    tail: dict[str, tuple[Line, ...]] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    launches: dict[str, tuple[int, int]] = field(default_factory=dict)
    lines: int = 0
    seen: int = 0

    @property
    def last_end(self) -> int:
        """Where the last process ended with an error."""
        return max((at for at, end in self.ends if end.exitcode), default=-1)

    def of_launch(self, last: bool) -> Scan:
        """What the last launch in each file said, or all before it said."""
        began = {file: order for file, (order, _) in self.launches.items()}
        return replace(
            self,
            hits=[hit for hit in self.hits if (hit.order >= began.get(hit.line.file, 0)) is last],
            raised=[(at, one) for at, one in self.raised if (at >= began.get(one.line.file, 0)) is last],
            ends=[(at, end) for at, end in self.ends if (at >= began.get(end.line.file, 0)) is last],
            cut=[(file, at) for file, at in self.cut if (at >= self.launches.get(file, (0, 0))[1]) is last],
            progress=self.progress if last else Progress(),
        )

    def went_on(self, order: int, line: Line) -> bool:
        """Whether the job went on after that line, so that the line did not end it."""
        return self.progress.went_on(order, line, self.last_end)
