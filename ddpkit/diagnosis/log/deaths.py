"""How a log tells that processes ended: torchrun's summary, exit codes and signals, in the words of launchers and shells."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace

from .lines import Line

# Words of which one stands in every line that is read here, in lower case (of ASCII).
WORDS = (
    "已杀死",
    "段错误",
    "总线错误",
    "已放弃",
    "getötet",
    "speicherzugriffsfehler",
    "processus arrêté",
    "erreur de segmentation",
    "exitcode",
    "exit code",
    "exit status",
    "return code",
    "returncode",
    "signal",
    "sigkill",
    "sigterm",
    "sigsegv",
    "sigabrt",
    "sigbus",
    "sigfpe",
    "killed",
    "core dumped",
    "segmentation fault",
    "bus error",
    "(local_rank: ",
    "root cause",
    "failures:",
    "aborted",
    "make: ***",
    "exiting process",
    "terminated with code",
    "forcefully terminating all other",
    "job failed",
    "closing signal",
    "is failed because",
    "error: failed to run",
    "backofflimitexceeded",
)

_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)")
_EXITCODE = re.compile(r"^\s*exitcode\s*: (-?\d+)\b(?: \(pid: (\d+)\))?")
_SECTION = re.compile(r"^\s*(Root Cause|Failures|Other Failures)\b.*:")
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\)(?: local_rank: (\d+) \(pid: (\d+)\))?")
_SIGNALS = tuple(
    re.compile(p)
    for p in (
        r"Signal (?P<number>\d+) \(SIG\w+\) received by PID",
        r"died with <Signals\.(?P<name>SIG\w+): \d+>",
        r"(?:terminated with|killed by|terminated by|received) signal:? (?P<name>SIG(?!TERM)\w+)\b",
        r"(?:exit(?:ed|s|ing)?|return(?:ed)?|finished)\b.{0,40}?(?:code|status)\W{0,4}-(?P<number>\d{1,2})\b",
        r"(?:exit(?:ed|s|ing)?|return(?:ed)?|finished|exitCode)\b.{0,40}?(?:code|status|exitCode)\W{0,4}(?P<shell>129|13\d|143)\b",
        r"Fatal Python error: (?P<words>Segmentation fault|Bus error|Aborted|Illegal instruction|Floating point exception)",
        r"Signal: (?P<words>Segmentation fault|Bus error|Aborted|Illegal instruction|Floating point exception) \(\d+\)",
        r"(?:^|[:\d]\s+|: )(?P<words>Segmentation fault|Bus error|Aborted|Killed|Illegal instruction|Floating point exception)"
        r"(?: *\(core dumped\)|\s*$|\s{2,}\S|\s+(?:python|torchrun|accelerate|deepspeed|bash|nohup|CUDA_))",
        r"(?:crashed with|terminated with|died from|killed by) (?:exit code -|signal )(?P<number>\d{1,2})\b",
        r"terminated with code -(?P<number>\d{1,2})\b",
        r"exited on signal \d+ \((?P<words>Segmentation fault|Bus error|Aborted|Killed)",
        r"task \d+: (?P<words>Segmentation fault|Bus error|Aborted|Killed|Illegal instruction)",
    )
)
# What a shell says in the languages of many clusters.
_ABROAD = {
    "已杀死": "SIGKILL",
    "段错误": "SIGSEGV",
    "总线错误": "SIGBUS",
    "已放弃": "SIGABRT",
    "Getötet": "SIGKILL",
    "Speicherzugriffsfehler": "SIGSEGV",
    "Processus arrêté": "SIGKILL",
    "Erreur de segmentation": "SIGSEGV",
}
_NAMES = {
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Aborted": "SIGABRT",
    "Killed": "SIGKILL",
    "Illegal instruction": "SIGILL",
    "Floating point exception": "SIGFPE",
}
_CODE = re.compile(
    r"(?:exit(?:ed|s|ing)?|return(?:ed)?|finished|exitCode)\b[^\n]{0,60}?(?:code|status|exitCode)\W{0,4}(?P<code>\d{1,3})\b"
    r"|returned non-zero exit status (?P<status>\d+)|^make: \*\*\* .* Error (?P<made>\d+)|^ExitCode (?P<of_script>\d+)"
    r"|terminated with code (?P<terminated>\d+)|Received (?P<received>\d+) from exiting process"
    r"|failed with exit ?code:? (?P<failed>\d+)"
)
_JOB_FAILED = re.compile(
    r"\b[Jj]ob (?:has )?failed\b(?!.* to )|Job \S+ is failed because|BackoffLimitExceeded|^Error: failed to run "
    r"|Sending process \d+ closing signal SIG"
)
_OF_COMMAND = re.compile(r"--local[-_]rank[=', ]+(\d+)")
_TASK = re.compile(r"(?i)\b(?:task|local_rank|rank):? (\d+)\b|\bprocess (\d+) terminated with\b")


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
        # Lightning kills the other ranks by SIGKILL, after it has said so.
        self._forceful = False

    def feed(self, line: Line) -> End | None:
        """Take a line in which one of `WORDS` stands; the end that it tells of."""
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
        text = line.text
        if self._forceful and text.strip() == "Killed":
            return None
        self._forceful = self._forceful or "Forcefully terminating all other" in text
        if name := signal_in(text):
            return End(line, _rank_in(line), -1, name)
        if _JOB_FAILED.search(text):
            return _end(line, None, 1)
        if code := _CODE.search(text):
            return _end(line, _rank_in(line), int(next(filter(None, code.groups()))))
        return None


def _end(
    line: Line,
    rank: int | None,
    code: int,
    pid: str | None = None,
    root: bool = False,
    listed: bool = False,
    by_torchrun: bool = False,
) -> End:
    return End(line, rank, code, _signal_name(-code) if code < 0 else "", root, listed, by_torchrun, pid or "")


def with_ranks(ends: list[tuple[int, End]]) -> list[tuple[int, End]]:
    """The ends, where torchrun gave a local rank first with the rank that its summary gives to the same process."""
    ranks = {end.pid: end.rank for _, end in ends if end.listed and end.pid}
    return [(at, replace(end, rank=ranks.get(end.pid, end.rank))) for at, end in ends]


def signal_in(text: str) -> str:
    """The signal that `text` says a process died of, "" for none."""
    for words, name in _ABROAD.items():
        if words in text:
            return name
    for pattern in _SIGNALS:
        if found := pattern.search(text):
            told = found.groupdict()
            if told.get("words"):
                return _NAMES[told["words"]]
            if told.get("name"):
                return str(told["name"])
            return _signal_name(int(told["number"]) if told.get("number") else int(told["shell"]) - 128)
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
