"""Whether a job went on after a line of its log: further steps, or the word that all is done."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable

from .lines import Line

# So many lines after a telling one are read, to see whether the job went on.
AFTERMATH = 150
MOST_STEPS = 50_000
CAUGHT_LINES = 8

_BAR = re.compile(r"\b(?P<n>\d+)/\d+ \[(?:\d+:)?\d+:\d+<")
_COUNTED = re.compile(
    r"(?i)\b(?P<what>step|iter|iteration|epoch|batch|global_step|num_updates|update|training result)(?:s(?!=))?\b[\"']?"
    r"\s*[:=\[#/ ]\s*\[?\s*(?P<n>\d+)"
)
_COMPLETED = re.compile(
    r"(?i)(?<![-\w])(?:(?:pre-?)?training|fine-?tuning|fit(?:ting)?|run|job|experiment|trainer\.fit|script|evaluation)\b(?!-)"
    r"[^\n]{0,60}?\b(?:completed?|finished|done|succeeded|successful(?:ly)?|reached|stopped: `max)"
    r"|train_runtime|worker group successfully finished|\bexit(?:ed)?\b.{0,20}\bcode:? 0\b"
    r"|\bphase\b.{0,20}\bSucceeded\b|\b(?:done|finished|completed) (?:training|successfully)"
)
# Other words of a good end, which one rank also says of itself alone.
_DONE = re.compile(r"(?i)\bexits? successfully|\b(?:all|rank)\b.{0,20}\b(?:done|finished)[.!]?$")
_FAILED = re.compile(r"(?i)fail|error|exit(?:ed)?\b.{0,20}\bcode:? [1-9]|killed|cancel")

_WARNS = re.compile(r"^\[W\d* ?|\bWARN(?:ING)?\b(?<!NCCL WARN)|\bUserWarning\b|^W\d{4} |^W /|: W /")
DEALT_WITH = re.compile(
    r"(?i)\b(going on|continu(e|ing)|try(ing)? again|retry(ing)?|skipp(ed|ing)|ignor(ed|ing)|falling back)\b"
)
_ALARM = re.compile(
    r"(?i)\b(error|fatal|failed|failure|terminate|assertion|abort\w*|cannot|could ?n[o']t|NCCL WARN|timed out)\b"
    r"|\[E\d* |what\(\):|watchdog"
)


def alarms(text: str) -> bool:
    """Whether a printed line speaks of an error rather than warns."""
    return not _WARNS.search(text) and not DEALT_WITH.search(text) and bool(_ALARM.search(text))


def counts(text: str) -> bool:
    """Whether a line counts steps."""
    return bool(_BAR.search(text) or _COUNTED.search(text))


def ends_well(lines: Iterable[Line]) -> bool:
    """Whether the last lines of a log tell of a good end: steps, or the word that all is done, and no alarm since."""
    claimed = 0
    for line in reversed(list(lines)):
        if alarms(line.text):
            return False
        if counts(line.text):
            return True
        if _DONE.search(line.text) or _claims_completion(line.text):
            claimed = line.number
        elif claimed and claimed - line.number > CAUGHT_LINES:
            return True
    return bool(claimed)


def _claims_completion(text: str) -> bool:
    return bool(_COMPLETED.search(text)) and not _FAILED.search(text)


class Progress:
    """The steps that a job reached, and where each log last says that all is done, in the order of the telling lines."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, str, str, tuple[int, ...]]] = []
        self._completed: dict[str, Line] = {}

    def note(self, line: Line, told: bool) -> None:
        """Keep what a line says of steps, unless it `told` of a failure, and whether it says that all is done."""
        if _claims_completion(line.text):
            self._completed[line.file] = line
        if told or len(self._steps) >= MOST_STEPS:
            return
        counted = [(each["what"].lower(), int(each["n"])) for each in _COUNTED.finditer(line.text)]
        if bar := _BAR.search(line.text):
            counted = [("bar", int(bar["n"]))]
        if counted:
            kind = " ".join(what for what, _ in counted)
            self._steps.append((line.order, line.file, kind, tuple(number for _, number in counted)))

    def went_on(self, line: Line, last_end: int) -> bool:
        """Whether the job made progress, or completed, after that line, so that the line did not end it.

        `last_end`: where the last process ended with an error; a job does not complete before that.
        """
        furthest: dict[str, list[tuple[int, ...]]] = {}
        begin = bisect_right(self._steps, line.order, key=lambda each: each[0])
        for _, file, kind, number in self._steps[begin : begin + AFTERMATH]:
            if file == line.file:
                reached = furthest.setdefault(kind, [number])
                if number > reached[-1]:
                    reached.append(number)
        if any(len(reached) > 2 for reached in furthest.values()):
            return True
        completed = self._completed.get(line.file)
        if completed is None or completed.order <= max(line.order, last_end):
            return False
        # So soon after an error, and without a step since, a program claims it that has only caught the error.
        return completed.number - line.number > CAUGHT_LINES or bool(furthest)
