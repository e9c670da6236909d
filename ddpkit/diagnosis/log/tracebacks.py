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
    """A traceback that has not come to its exception yet; torchrun's summary and some loggers indent it by `margin`."""

    writer: tuple[int | None, str]
    began: int
    last: int
    margin: str
    boxed: bool
    ignored: bool
    frames: list[Frame] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


class Tracebacks:
    """The open tracebacks of one log."""

    def __init__(self) -> None:
        self._open: list[_Open] = []
        # Writers of which Python ignores the next exception, and of which it ignored the last one.
        self._ignored: set[tuple[int | None, str]] = set()
        self._was_ignored: set[tuple[int | None, str]] = set()

    def __bool__(self) -> bool:
        return bool(self._open)

    def inside(self, line: Line) -> bool:
        """Whether `line` belongs to an open traceback: a frame, or the source that it quotes."""
        found = self._of(line)
        return found is not None and line.text.removeprefix(found.margin).startswith((" ", "\t", "│", "|"))

    def cut(self, end: int) -> list[int]:
        """The first lines of the tracebacks that the end of the log, at line `end`, cuts off."""
        return [one.began for one in self._open if one.frames and end - one.last < NEAR_THE_END]

    def feed(self, line: Line, alone: bool) -> Raised | None:
        """The exception, where the next line names one; `alone`: also without a traceback."""
        self._open = [one for one in self._open if line.number - one.last <= PATIENCE]
        if HEADER.search(line.text):
            self._begin(line)
        elif _IGNORED.match(line.text) or (_CHAINED.match(line.text) and line.writer in self._was_ignored):
            self._ignored.add(line.writer)
        elif one := self._of(line):
            return self._go_on(one, line)
        elif alone and (named := RAISED.match(line.text.lstrip())) and "Warning" not in named["type"]:
            if line.writer not in self._ignored:
                return Raised(line, named["type"], (named["message"] or "").strip())
            self._ignored.remove(line.writer)
        return None

    def _begin(self, line: Line) -> None:
        margin = line.text[: -len(line.text.lstrip())]
        boxed = line.text.startswith(("╭", "┌", "│", "+", "|"))
        ignored = line.writer in self._ignored
        self._ignored.discard(line.writer)
        self._open.append(_Open(line.writer, line.number, line.number, margin, boxed, ignored, lines=[line.text]))

    def _go_on(self, one: _Open, line: Line) -> Raised | None:
        """The exception that ends an open traceback, or None where the line is another of its lines."""
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

    def _end(self, one: _Open, line: Line, named: re.Match[str]) -> Raised | None:
        self._open.remove(one)
        if one.ignored:
            self._was_ignored.add(one.writer)
            return None
        self._was_ignored.discard(one.writer)
        message = (named["message"] or "").strip()
        return Raised(line, named["type"], message, tuple(one.frames), "\n".join(one.lines))

    def _of(self, line: Line) -> _Open | None:
        """The latest open traceback of the writer of `line`."""
        return next((one for one in reversed(self._open) if one.writer == line.writer), None)
