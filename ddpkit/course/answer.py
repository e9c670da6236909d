"""`ddpkit.answer`: asks the reader who is at fault, and where, before a run shows its verdict."""

from __future__ import annotations

import os
import random
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpkit.display.notebook import widget_bundle
from ddpkit.errors import LaunchError
from ddpkit.run import Run
from ddpkit.runfolder import wire
from ddpkit.runfolder.answers import Answered, keep_answers

from .exercises import seed, unsealed

QUESTIONS = Path(__file__).parents[1] / "tasks" / "questions.toml"
# Without a lesson: what every run can be asked.
ANY = ({"kind": "rank"}, {"kind": "line"})
UNTOLD = "cannot be told"
ANSWERED = "Your answer is kept; reveal() shows it beside the verdict."
PREDICTED = "Your predictions are kept; each result is told beside its own."


@dataclass(frozen=True)
class Question:
    """What is asked, the answers on offer, those that are right, and the evidence that decides."""

    asks: str
    offers: tuple[str, ...]
    right: tuple[str, ...] = ()
    decides: str = ""

    def offered(self, said: str | int) -> str:
        """The answer on offer that `said` means: itself, a rank's number, or a part of one alone.

        Raises:
            LaunchError: it is none, or a part of several.
        """
        words = f"rank {said}" if isinstance(said, int) else said
        found = [offer for offer in self.offers if offer == words] or [o for o in self.offers if words in o]
        if len(found) != 1:
            raise LaunchError(f"answer: {said!r} is not one of the answers to {self.asks!r}: {'; '.join(self.offers)}.")
        return found[0]


class Answer:
    """Questions, and what becomes of the answers. In a notebook it shows them as widgets; `give` answers from code.

    `after` is what it says once they are given; `keep` takes them, and `kept` tells whether something has them already.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        after: str,
        keep: Callable[[Sequence[str]], None] | None = None,
        kept: Callable[[], bool] | None = None,
    ) -> None:
        self.questions = tuple(questions)
        self._after, self._keep, self._kept = after, keep, kept
        self._said: tuple[str, ...] = ()

    @property
    def kept(self) -> bool:
        """Whether all questions are answered."""
        return self._kept() if self._kept else bool(self._said)

    @property
    def said(self) -> tuple[str, ...]:
        """The answers, in the order of the questions.

        Raises:
            LaunchError: they are not given yet.
        """
        if not self._said:
            raise LaunchError("answer: nothing is answered yet; choose above, and press Answer.")
        return self._said

    def give(self, *said: str | int) -> Answer:
        """Answer every question, in order. The first answer counts: a later one changes nothing.

        Raises:
            LaunchError: another number of answers than of questions, or one that is not on offer.
        """
        if len(said) != len(self.questions):
            raise LaunchError(f"answer: {len(self.questions)} questions, and {len(said)} answers: {self}")
        chosen = [question.offered(words) for question, words in zip(self.questions, said, strict=True)]
        if not self.kept:
            self._said = tuple(chosen)
            if self._keep:
                self._keep(chosen)
        return self

    def __repr__(self) -> str:
        if self.kept:
            return self._after
        return "\n".join(f"{question.asks} ({'; '.join(question.offers)})" for question in self.questions)

    def _repr_mimebundle_(self, **_: Any) -> Any:
        from .answer_view import AnswerView

        return widget_bundle(AnswerView(self).box, repr(self))


def answer(run: Run | None, lesson: str = "") -> Answer:
    """Ask about `run`, which was launched with `reveal=False`: which rank, which line; or as `lesson` "02" asks.

    `run.reveal()` shows the verdict once all are answered. With None for a run, the lesson asks for predictions, and `said`
    has them. Where $DDPKIT_ANSWERS names a TOML file, its answers are given.

    Raises:
        LaunchError: the run goes on, there are no questions for this lesson, or the file lacks its answers.
    """
    if run is not None and run.state == "running":
        raise LaunchError(f"answer: {run.name} is still running; wait() for it, then answer.")
    known = tomllib.loads(unsealed(QUESTIONS))
    if lesson and lesson not in known:
        raise LaunchError(f"answer: there are no questions for lesson {lesson!r}; there are for {', '.join(known)}.")
    questions = [_question(run, **one) for one in known.get(lesson, ANY)]
    asked = ask(run, questions) if run is not None else Answer(questions, PREDICTED)
    if (given := given_for(lesson)) is not None:
        asked.give(*given)
    return asked


def ask(run: Run, questions: Sequence[Question]) -> Answer:
    """These questions about `run`; the answers are kept in its folder, each beside the right one."""

    def keep(said: Sequence[str]) -> None:
        judged = []
        for one, words in zip(questions, said, strict=True):
            right = one.right[0] if one.right else UNTOLD
            judged.append(Answered(one.asks, words, words in one.right, right, one.decides))
        keep_answers(run.folder, judged)

    return Answer(questions, ANSWERED, keep, lambda: bool(run.answers))


def given_for(name: str) -> Any:
    """What the file of $DDPKIT_ANSWERS answers for `name`, a lesson or a lab; None where no file is named.

    Raises:
        LaunchError: it has nothing for `name`.
    """
    if not (path := os.environ.get(wire.ENV_ANSWERS)):
        return None
    given = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    if name not in given:
        raise LaunchError(f"answer: {path} ({wire.ENV_ANSWERS}) has no answers for {name!r}.")
    return given[name]


def _question(
    run: Run | None, kind: str, asks: str = "", right: Sequence[str] = (), decides: str = "", offers: Sequence[str] = ()
) -> Question:
    if kind == "offers":
        shuffled = random.Random(f"{seed()} {asks}").sample(offers, len(offers))
        return Question(asks, tuple(shuffled), tuple(right), decides)
    if run is None:
        raise LaunchError(f"answer: {asks or 'this'} is asked about a run; give the run instead of None.")
    if kind == "rank":
        ranks = [f"rank {rank}" for rank in range(run.world_size)]
        every = ["every rank"] if run.world_size > 1 else []
        return Question(asks or "Which rank is at fault?", (*ranks, *every, UNTOLD), _right(run.culprit), decides)
    numbered = enumerate(run.script.splitlines(), 1)
    lines = [f"line {number}: {text.strip()}" for number, text in numbered if text.strip()]
    texts = right or [row.where for row in run.reveal(anyway=True).rows if row.tone == "fault" and row.where]
    found = [line for line in lines if any(text in line for text in texts)]
    return Question(asks or "At which line?", tuple(lines), tuple(found), decides)


def _right(culprit: Any) -> tuple[str, ...]:
    if culprit is None:
        return (UNTOLD,)
    if isinstance(culprit, str):
        return (culprit,)
    return tuple(f"rank {rank}" for rank in (culprit if isinstance(culprit, tuple) else (culprit,)))
