"""Lines of a program as tracebacks and stack dumps give them, and which of them are the user's own."""

from __future__ import annotations

import linecache
import os
import re
from dataclasses import dataclass
from pathlib import Path

from . import wire

_FRAME = re.compile(
    r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$(?:\n    (?P<source>\S.*)$)?', re.MULTILINE
)


@dataclass(frozen=True)
class Frame:
    """One line of a traceback. `own`: the user's code rather than Python's, a package's or ddpkit's."""

    file: str
    line: int
    function: str
    source: str
    own: bool = True

    @property
    def text(self) -> str:
        """As the text forms quote it: `line 19: loss = net(x).mean()`, line counted as the cell or script counts."""
        return f"line {self.line}: {self.source}" if self.source else f"line {self.line} of {Path(self.file).name}"


def stack_frames(dump: str, cells: dict[str, str]) -> list[Frame]:
    """The frames of the main thread, or of the one that crashed, innermost first, with source lines where they are known."""
    threads = re.split(r"^(?=Stack \(|Current thread|Thread )", dump, flags=re.MULTILINE)
    firsts = ("Stack (", "Current thread", "Thread MainThread")
    chosen = next((t for t in threads if t.startswith(firsts) and "  File " in t), threads[-1])
    frames = []
    for found in _FRAME.finditer(chosen):
        file, line, function = found["file"], int(found["line"]), found["function"]
        own = not any(
            mark in file for mark in ("site-packages", "/lib/python", "<frozen", f"{os.sep}ddpkit{os.sep}rank")
        )
        own = own and Path(file).name != wire.FUNCTION_SCRIPT
        frames.append(Frame(file, line, function, found["source"] or _source_line(file, line, cells), own))
    return frames


def with_sources(dump: str, cells: dict[str, str]) -> str:
    """`dump` with the source line below each frame, where it is known now: a file may have changed when it is read again."""

    def with_source(found: re.Match[str]) -> str:
        source = found["source"] or _source_line(found["file"], int(found["line"]), cells)
        frame = found[0].partition("\n")[0]
        return f"{frame}\n    {source}" if source else frame

    return _FRAME.sub(with_source, dump)


def _source_line(file: str, line: int, cells: dict[str, str]) -> str:
    linecache.checkcache(file)
    lines = cells[file].splitlines() if file in cells else linecache.getlines(file)
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""
