"""What the reader answered about a run, before it showed its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from . import wire


@dataclass(frozen=True)
class Answered:
    """One question: what the reader said, whether that is right, what is, and the evidence that decides."""

    asks: str
    said: str
    right: bool
    answer: str
    decides: str

    def __str__(self) -> str:
        compared = "right" if self.right else f'it is "{self.answer}"'
        return f'{self.asks} You said "{self.said}": {compared}. {self.decides}'.strip()


def read_answers(folder: Path) -> tuple[Answered, ...]:
    """The answers that are kept in the run folder, in the order of the questions."""
    found = wire.read_record(folder / wire.ANSWERED) or {"answers": ()}
    return tuple(Answered(**one) for one in found["answers"])


def keep_answers(folder: Path, answers: Sequence[Answered]) -> None:
    """Write the answers into the run folder."""
    wire.write_record(folder / wire.ANSWERED, {"answers": [asdict(one) for one in answers]})
