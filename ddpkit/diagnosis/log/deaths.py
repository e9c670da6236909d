"""How a log tells that processes ended: torchrun's summary, and the exit codes and signals that launchers and shells print."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace

from .lines import Line
from .literals import required

_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)")
_EXITCODE = re.compile(r"^\s*exitcode\s*: (-?\d+)\b(?: \(pid: (\d+)\))?")
_SECTION = re.compile(r"^\s*(Root Cause|Failures|Other Failures)\b.*:")
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\)(?: local_rank: (\d+) \(pid: (\d+)\))?")
_NAMES = {
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Aborted": "SIGABRT",
    "Killed": "SIGKILL",
    "Illegal instruction": "SIGILL",
    "Floating point exception": "SIGFPE",
}
_DEATH = f"(?P<words>{'|'.join(_NAMES)})"
_ENDS = r"(?:exit(?:ed|s|ing)?|return(?:ed)?|finished|terminated|crashed)\b"
_SIGNALS = tuple(
    re.compile(p)
    for p in (
        r"Signal (?P<number>\d+) \(SIG\w+\) received by PID",
        r"died with <Signals\.(?P<name>SIG\w+): \d+>",
        r"(?:terminated with|killed by|terminated by|received) signal:? (?P<name>SIG(?!TERM)\w+)\b",
        r"(?:terminated with|killed by|died from) signal (?P<number>\d{1,2})\b",
        rf"{_ENDS}.{{0,40}}?(?:code|status)\W{{0,4}}-(?P<number>\d{{1,2}})\b",
        rf"{_ENDS}.{{0,40}}?(?:code|status|exitCode)\W{{0,4}}(?P<shell>129|13\d|143)\b",
        rf"(?:Fatal Python error: |Signal: |exited on signal \d+ \(|task \d+: ){_DEATH}",
        rf"(?:^|[:\d]\s+|: ){_DEATH}"
        r"(?: *\(core dumped\)|\s*$|\s{2,}\S|\s+(?:python|torchrun|accelerate|deepspeed|bash|nohup|CUDA_))",
    )
)
_CODE = re.compile(rf"{_ENDS}[^\n]{{0,60}}?(?:code|status|exitCode)(?: of)?\W{{0,4}}(\d{{1,3}})\b")
_JOB_FAILED = re.compile(
    r"\b[Jj]ob (?:has )?failed\b(?!.* to )|BackoffLimitExceeded|Sending process \d+ closing signal SIG"
)
_OF_COMMAND = re.compile(r"--local[-_]rank[=', ]+(\d+)")
_TASK = re.compile(r"(?i)\b(?:task|local_rank|rank):? (\d+)\b|\bprocess (\d+) terminated with\b")

_ALL = (_RANK, _EXITCODE, _SECTION, _FAILED, _CODE, _JOB_FAILED, *_SIGNALS)
# Every line that is read here holds one of these words, in lower case.
WORDS = frozenset(word for pattern in _ALL for word in required(pattern))


@dataclass(frozen=True)
class End:
    """A process that ended, as `line` says: `signal` is what it died of, else `exitcode`.

    `by_torchrun`: torchrun says so; `listed`: in its summary, `root`: as the first that failed.
    """

    line: Line
    rank: int | None
    exitcode: int
    signal: str = ""
    root: bool = False
    listed: bool = False
    by_torchrun: bool = False
    pid: str = ""


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
            self._section, self.rank = section[1], None
        elif rank := _RANK.match(text):
            self.rank = int(rank[1])
        elif code := _EXITCODE.match(text):
            root = self._section == "Root Cause"
            return _end(line, self.rank, int(code[1]), code[2], root=root, listed=True, by_torchrun=True)
        elif failed := _FAILED.search(text):
            rank_told = int(failed[2]) if failed[2] else None
            return _end(line, rank_told, int(failed[1]), failed[3], by_torchrun=True)
        else:
            return self._printed(line)
        return None

    def _printed(self, line: Line) -> End | None:
        """An end in the words of shells, schedulers and launchers other than torchrun."""
        if name := _signal_in(line.text):
            return End(line, _rank_in(line), -1, name)
        if _JOB_FAILED.search(line.text):
            return _end(line, None, 1)
        code = _CODE.search(line.text)
        return _end(line, _rank_in(line), int(code[1])) if code and int(code[1]) else None


def _end(line: Line, rank: int | None, code: int, pid: str | None = None, **told: bool) -> End:
    return End(line, rank, code, _signal_name(-code) if code < 0 else "", pid=pid or "", **told)


def with_ranks(ends: list[End]) -> list[End]:
    """The ends with the ranks of torchrun's summary, also where torchrun named a process by its local rank first."""
    ranks = {end.pid: end.rank for end in ends if end.listed and end.pid}
    return [replace(end, rank=ranks.get(end.pid, end.rank)) for end in ends]


def _signal_in(text: str) -> str:
    """The signal that a process died of, as `text` says; "" for none."""
    for pattern in _SIGNALS:
        if found := pattern.search(text):
            kind, told = next((kind, told) for kind, told in found.groupdict().items() if told)
            if kind == "words":
                return _NAMES[told]
            return told if kind == "name" else _signal_name(int(told) - (128 if kind == "shell" else 0))
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def _rank_in(line: Line) -> int | None:
    if line.rank is not None:
        return line.rank
    found = _OF_COMMAND.search(line.text) or _TASK.search(line.text)
    return int(next(filter(None, found.groups()))) if found else None
