"""Puts Python's tracebacks together from the lines of a log, for each writer, however they interleave."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from ddpkit.runfolder.frames import Frame, is_own

from .lines import Line

MOST_LINES = 400
# A traceback may pause for so many lines of others.
PATIENCE = 300
NEAR_THE_END = 5

HEADER = re.compile(r"Traceback \(most recent call last\)|^-+ ?Traceback")
# torchrun's summary and some loggers indent a whole traceback.
_SET_IN = re.compile(r"^(?P<summary>\s*traceback\s*: )?(?P<margin>\s*)")
_FRAME = re.compile(r'^[\s>|]*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.*))?$')
_SHORT = re.compile(r"^(?:File )?(?P<file>/[^\s:]+\.py):(?P<line>\d+)(?:,)? in (?P<function>\S+)")
# Exceptions have names that end in one of these, or a module before the name.
_ENDING = (
    r"(?:Error|Exception|Interrupt|Exit|Failure|Failed|Timeout|Expired|Quit|Abort|Iteration|Warning|NotFound|Unavailable"
    r"|Terminated|Killed|Canceled|Cancelled|Retry|Group)"
)
RAISED = re.compile(
    rf"^(?:\w+(?:\.\w+)*\.)?(?P<type>\w+{_ENDING}|Exception|(?<=\.)[A-Z]\w+)(?P<of>\([\w.]+\))?(?:: ?(?P<message>.*)|:?)$"
)
# Python prints these and goes on: when an object is deleted, and when a logger fails.
_IGNORED = re.compile(r"^(?:Exception ignored (?:in|on|when)|--- Logging error ---)")
_CHAINED = re.compile(r"^(?:During handling of the above exception|The above exception was the direct cause)")
_BOX = re.compile(r"^[│┃|╭╰─━┌└❱ ]+")


@dataclass(frozen=True)
class Raised:
    """An exception: the `line` that names it, the frames that led to it, and `text`, the whole traceback."""

    line: Line
    type: str
    message: str
    frames: tuple[Frame, ...] = ()
    text: str = ""

    @property
    def where(self) -> Frame | None:
        """The user's innermost frame; the innermost of all where none is the user's."""
        return next((f for f in reversed(self.frames) if f.own), self.frames[-1] if self.frames else None)


@dataclass
class _Open:
    """A traceback that has not come to its exception yet."""

    writer: tuple[str, int | None, str]
    began: int
    frames: list[Frame] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    boxed: bool = False
    margin: str = ""
    ignored: bool = False
    last: int = 0


class Tracebacks:
    """The open tracebacks of one log."""

    def __init__(self) -> None:
        self._open: list[_Open] = []
        self._ignored: set[tuple[str, int | None, str]] = set()
        self._was_ignored: dict[tuple[str, int | None, str], int] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def inside(self, line: Line) -> bool:
        """Whether `line` belongs to an open traceback: a frame, or the source that it quotes."""
        found = self._of(line)
        return found is not None and line.text.removeprefix(found.margin).startswith((" ", "\t", "│", "|"))

    def ignores(self, line: Line) -> bool:
        """Whether Python has just said that it ignores what the writer of `line` raises."""
        writer = _writer(line)
        ignored = writer in self._ignored or self._was_ignored.get(writer) == line.number
        self._ignored.discard(writer)
        return ignored

    def cut(self, end: int) -> list[int]:
        """The first lines of the tracebacks that the end of the log, at line `end`, cuts off."""
        return [one.began for one in self._open if one.frames and end - one.last < NEAR_THE_END]

    def feed(self, line: Line) -> Raised | None:
        """The exception, where the next line names one."""
        self._open = [one for one in self._open if line.number - one.last <= PATIENCE]
        if HEADER.search(line.text):
            self._begin(line)
            return None
        if _IGNORED.match(line.text) or (_CHAINED.match(line.text) and _writer(line) in self._was_ignored):
            self._ignored.add(_writer(line))
            return None
        one = self._of(line)
        if one is None:
            return None
        if len(one.lines) < MOST_LINES:
            one.lines.append(line.text)
        text = _BOX.sub("", line.text).rstrip(" │┃|") if one.boxed else line.text.removeprefix(one.margin)
        if found := _FRAME.match(text) or _SHORT.match(text):
            one.last = line.number
            file = found["file"]
            one.frames.append(Frame(file, int(found["line"]), (found["function"] or "").strip(), "", is_own(file)))
        elif text.startswith((" ", "\t")) or (one.boxed and _BOX.match(line.text)):
            one.last = line.number
            last = one.frames[-1] if one.frames else None
            if last and not last.source and not one.boxed and text.strip(" ^~│└"):
                one.frames[-1] = replace(last, source=text.strip())
        elif named := RAISED.match(text):
            return self._end(one, line, named)
        return None

    def _begin(self, line: Line) -> None:
        one = _Open(_writer(line), line.number, last=line.number, lines=[line.text])
        one.ignored = self.ignores(line)
        one.boxed = line.text.startswith(("╭", "┌", "│", "+", "|"))
        if set_in := _SET_IN.match(line.text):
            one.margin = "  " if set_in["summary"] else set_in["margin"]
        self._open.append(one)

    def _end(self, one: _Open, line: Line, named: re.Match[str]) -> Raised | None:
        self._open.remove(one)
        if one.ignored:
            self._was_ignored[one.writer] = line.number
            return None
        self._was_ignored.pop(one.writer, None)
        message = (named["message"] or "").strip()
        return Raised(line, named["type"], message, tuple(one.frames), "\n".join(one.lines))

    def _of(self, line: Line) -> _Open | None:
        """The latest open traceback of the writer of `line`."""
        writer = _writer(line)
        return next((one for one in reversed(self._open) if one.writer == writer), None)


def _writer(line: Line) -> tuple[str, int | None, str]:
    return line.file, line.rank, line.key
