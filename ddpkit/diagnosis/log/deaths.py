"""How a log tells that processes ended: torchrun's summary, and the exit codes and signals that launchers and shells print."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from typing import Any

from .lines import Line
from .literals import required

_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)")
_EXITCODE = re.compile(r"^\s*exitcode\s*: (-?\d+)\b(?: \(pid: (\d+)\))?")
_SECTION = re.compile(r"^\s*(Root Cause|Failures|Other Failures)\b.*:")
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\)(?: local_rank: (\d+) \(pid: (\d+)\))?")
_NAMES = {
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Aborted": signal.SIGABRT,
    "Killed": signal.SIGKILL,
    "Illegal instruction": signal.SIGILL,
    "Floating point exception": signal.SIGFPE,
}
# A launcher that says it got a SIGTERM passes it on; it did not die of it.
_SIGNAL = re.compile(
    r"(?:(?:terminated|killed|died|exited)(?: with| by| from| on)? signal:? |received signal:? (?=SIG)"
    r"|died with <Signals\.|Signal (?=\d+ \())"
    r"(?:(?P<number>\d{1,2})\b|(?P<name>SIG(?!TERM)[A-Z]+))"
    rf"|(?:^|[:\d]\s+)(?P<words>{'|'.join(_NAMES)})"
    r"(?: *\(|\s*$|\s{2,}\S|\s+(?:python|torchrun|accelerate|deepspeed|bash|nohup|CUDA_))"
)
_CODE = re.compile(
    r"(?:exit(?:ed|s|ing)?|return(?:ed)?|finished|terminated|crashed)\b"
    r".{0,60}?(?:code|status|exitCode)(?: of)?\W{0,4}?(-?\d{1,3})\b"
)
_JOB_FAILED = re.compile(
    r"\b[Jj]ob (?:has )?failed\b(?!.* to )|BackoffLimitExceeded|Sending process \d+ closing signal SIG"
)
_OF_COMMAND = re.compile(r"--local[-_]rank[=', ]+(\d+)")
_TASK = re.compile(r"(?i)\b(?:task|local_rank|rank):? (\d+)\b|\bprocess (\d+) terminated with\b")

_ALL = (_RANK, _EXITCODE, _SECTION, _FAILED, _SIGNAL, _CODE, _JOB_FAILED)
# Every line that is read here holds one of these words, in lower case.
WORDS = frozenset(word for pattern in _ALL for word in required(pattern))


@dataclass(frozen=True)
class End:
    """A process that ended, as `line` says; `exitcode` is below 0 where a signal ended it.

    `by_torchrun`: torchrun says so; `listed`: in its summary, `root`: as the first that failed.
    """

    line: Line
    rank: int | None
    exitcode: int
    root: bool = False
    listed: bool = False
    by_torchrun: bool = False
    pid: str = ""

    @property
    def signal(self) -> str:
        """What it died of, also where a shell says so by an exit code above 128; "" for none."""
        try:
            return signal.Signals(-self.exitcode if self.exitcode < 0 else self.exitcode - 128).name
        except ValueError:
            return ""


class Deaths:
    """Reads one log for the ends of processes."""

    def __init__(self) -> None:
        self.rank: int | None = None
        """The rank of which torchrun's summary is telling."""
        self._section = ""

    def feed(self, line: Line) -> End | None:
        """The end that a line tells of, which holds one of `WORDS`."""
        text = line.text
        if section := _SECTION.match(text):
            self._section = section[1]
        elif rank := _RANK.match(text):
            self.rank = int(rank[1])
        elif code := _EXITCODE.match(text):
            root = self._section == "Root Cause"
            return End(line, self.rank, int(code[1]), root, listed=True, by_torchrun=True, pid=code[2] or "")
        elif failed := _FAILED.search(text):
            rank_told = int(failed[2]) if failed[2] else None
            return End(line, rank_told, int(failed[1]), by_torchrun=True, pid=failed[3] or "")
        else:
            return _printed(line)
        return None


def _printed(line: Line) -> End | None:
    """An end in the words of shells, schedulers and launchers other than torchrun."""
    if found := _SIGNAL.search(line.text):
        number: Any = found["number"] or _NAMES.get(found["words"]) or getattr(signal, found["name"], 1)
        return End(line, _rank_in(line), -int(number))
    code = _CODE.search(line.text)
    if code and int(code[1]):
        return End(line, _rank_in(line), int(code[1]))
    return End(line, None, 1) if _JOB_FAILED.search(line.text) else None


def with_ranks(ends: list[End]) -> list[End]:
    """The ends with the ranks of torchrun's summary, also where torchrun named a process by its local rank first."""
    ranks = {end.pid: end.rank for end in ends if end.listed and end.pid}
    return [replace(end, rank=ranks.get(end.pid, end.rank)) for end in ends]


def _rank_in(line: Line) -> int | None:
    if line.rank is not None:
        return line.rank
    found = _OF_COMMAND.search(line.text) or _TASK.search(line.text)
    return int(next(filter(None, found.groups()))) if found else None
