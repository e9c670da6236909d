"""Reads the lines of tracebacks and stack dumps, and tells which are the user's own."""

from __future__ import annotations

import ast
import io
import itertools
import linecache
import re
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import wire

_FRAME = re.compile(
    r'^  File "(?P<file>.+)", line (?P<line>\d+),? in (?P<function>.+)$(?:\n    (?P<source>\S.*)$)?', re.MULTILINE
)
_NOT_OWN = re.compile(r"/lib/python|[/\\]ddpkit[/\\](rank|recorder|processes)[/\\]")
_IN_A_CELL = re.compile(r"ipykernel_\d+[/\\]|<ipython-input")
# A longer statement is not quoted as a whole.
_MOST_OF_A_STATEMENT = 200
# The spaces before a comment that is aligned with others.
_ALIGNED = re.compile(r"\s{3,}(?=#)")
_FOR_A_THREAD = re.compile(r"(threading|queue|futures[/\\]\w+)\.py$")
_FOR_ITS_END = re.compile(r"[ .](join|result|shutdown)$")
BACKWARD = "_engine_run_backward"
_IN_DISTRIBUTED = re.compile(r"torch.distributed.(distributed_c10d|nn|_functional_collectives)")
_PAIRWISE = re.compile(_IN_DISTRIBUTED.pattern + r".* (send|recv)$")
# Functions that only ask about the process group, as a loader does, wait for nobody.
_ASKS = re.compile(r"(^|\.)(_?(is|get)_\w+|default_pg|WORLD)$")
_JOINING = re.compile(r"\b(init_process_group|_?rendezvous|_store_based_barrier|_create_c10d_store)\b")
# Without workers the rank itself reads, in other functions.
_IN_LOADER = re.compile(
    r"torch.utils.data.dataloader\.py (\w+\.)*(_(try_)?get_data|_shutdown_workers)$|_MultiProcessingDataLoaderIter\."
)
_LOADER = re.compile(r"dataloader\.py.* ")
_TRAINS = re.compile(r"torch.distributed.|_engine_run_backward")


@dataclass(frozen=True)
class Frame:
    """One line of a traceback, with its whole statement as `source`.

    `own`: the user's code rather than Python's, a package's or ddpkit's. `elsewhere`: in another file than the launched one.
    """

    file: str
    line: int
    function: str
    source: str
    own: bool = True
    elsewhere: bool = False

    @property
    def name(self) -> str:
        """The function's name without its class, which only some tracebacks have."""
        return self.function.rpartition(".")[2]

    @property
    def text(self) -> str:
        """`line 19: loss = net(x).mean()`, or `line 3 of data.py: ...` if that is not the launched file."""
        where = f"line {self.line}"
        if self.elsewhere or not self.source:
            where += f" of {Path(self.file).name}"
        return f"{where}: {_ALIGNED.sub('  ', self.source)}" if self.source else where


class Sources(dict[str, str]):
    """The texts that a job ran, by file name; `launched`: the files that it was launched with (empty: not known)."""

    launched: frozenset[str] = frozenset()


def sources(folder: Path) -> Sources:
    """The texts that the job of a run folder ran, by file name: its script or cells, and the user's modules."""
    spec, called = wire.read_record(folder / wire.JOB) or {}, wire.read_record(folder / wire.CALL_CONTEXT) or {}
    script, program, cells = spec.get("script", ""), spec.get("program", ""), called.get("sources", {})
    own = {program: wire.read_text(folder / script)} if script and program else {}
    found = Sources(own | (wire.read_record(folder / wire.SOURCES) or {}) | cells)
    # An older ddpkit did not record the file of a function.
    if called.get("file") or not called:
        found.launched = frozenset(filter(None, (program, called.get("file"), *cells)))
    return found


def read_frame(record: Mapping[str, Any] | None, cells: Sources) -> Frame | None:
    """The line of a record; None for None."""
    return _completed(Frame(**record), cells) if record else None


def _completed(frame: Frame, cells: Sources) -> Frame:
    """The same line, with its whole statement, and whether its file is another than the launched one."""
    elsewhere = bool(cells.launched) and frame.file not in cells.launched and not _IN_A_CELL.search(frame.file)
    source = frame.source
    # The file may have changed since.
    if frame.own and source and _source_line(frame.file, frame.line, cells) == source:
        text = cells.get(frame.file) or "".join(linecache.getlines(frame.file))
        source = _statement(text, frame.line) or source
    return replace(frame, source=source, elsewhere=elsewhere)


@lru_cache(maxsize=1024)
def _statement(text: str, line: int) -> str:
    """The statement around a line, on one line and without comments; of a loop or an `if`, its head.

    "" if the statement has one line only, is very long, or cannot be read.
    """
    own: ast.stmt | None = None
    for node in nodes_of(text):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            own = node  # inner nodes come later
    if own is None:
        return ""
    body: list[ast.stmt] = getattr(own, "body", [])
    last = body[0].lineno - 1 if body else own.end_lineno or 0
    if last <= own.lineno or line > last:
        return ""
    lines = text.splitlines()[own.lineno - 1 : last]
    try:
        for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
            if token.type == tokenize.COMMENT:
                lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    except (tokenize.TokenError, SyntaxError):
        pass  # the head of a loop has no end
    joined = " ".join(filter(None, map(str.strip, lines)))
    joined = re.sub(r"(?<=[(\[{]) |,? (?=[)\]}])", "", joined)
    return joined if len(joined) <= _MOST_OF_A_STATEMENT else ""


@lru_cache(maxsize=64)
def nodes_of(text: str) -> list[ast.AST]:
    """The syntax tree of a Python text, outer nodes first; empty if it is none."""
    try:
        return list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        return []


def stack_frames(dump: str, cells: Sources) -> list[Frame]:
    """The frames of the main thread, or of the one that crashed, innermost first.

    If the main thread only waits for a thread that trains, the frames of that thread.
    """
    threads = _threads(dump)
    if not threads:
        return []
    chosen = threads[-1]
    for thread in reversed(threads):
        if thread.startswith(("Stack (", "Current thread", "Thread MainThread")):
            chosen = thread
    frames = frames_of(chosen, cells)
    if not chosen.startswith("Thread MainThread") or not _waits_for_a_thread(frames):
        return frames
    others = []
    for thread in threads:
        beside = frames_of(thread, cells)
        if thread is chosen or not any(frame.own for frame in beside):
            continue
        if _match(beside, _TRAINS):
            return beside
        others.append(beside)
    # Without a training thread, a single other one is taken if the main thread waits for the end of a thread. Otherwise
    # it may be a heartbeat, say.
    return others[0] if len(others) == 1 and _match(frames, _FOR_ITS_END) else frames


def _threads(dump: str) -> list[str]:
    return [t for t in re.split(r"^(?=Stack \(|Current thread|Thread )", dump, flags=re.MULTILINE) if "  File " in t]


def _match(frames: Iterable[Frame], pattern: re.Pattern[str]) -> bool:
    """Whether `pattern` is in the `file function` of one of these frames."""
    return any(pattern.search(f"{frame.file} {frame.function}") for frame in frames)


def frames_of(thread: str, cells: Sources) -> list[Frame]:
    """The frames in one stack or traceback, in its order."""
    frames = []
    for found in _FRAME.finditer(thread):
        file, line, function = found["file"], int(found["line"]), found["function"]
        source = found["source"] or _source_line(file, line, cells)
        frames.append(_completed(Frame(file, line, function, source, is_own(file)), cells))
    return frames


def is_own(file: str) -> bool:
    """Whether `file` is the user's code rather than Python's, a package's or ddpkit's."""
    return not wire.is_installed(file) and not _NOT_OWN.search(file) and Path(file).name != wire.FUNCTION_SCRIPT


def _waits_for_a_thread(frames: Sequence[Frame]) -> bool:
    inner = _inner(frames)
    if not inner:
        return bool(frames) and ".acquire(" in frames[0].source
    return bool(_FOR_A_THREAD.search(inner[0].file)) and not _match(inner, _LOADER)


def with_sources(dump: str, cells: Sources) -> str:
    """`dump` with the source line below each frame: the file may change before it is read again."""

    def with_source(found: re.Match[str]) -> str:
        source = found["source"] or _source_line(found["file"], int(found["line"]), cells)
        frame = found[0].partition("\n")[0]
        return f"{frame}\n    {source}" if source else frame

    return _FRAME.sub(with_source, dump)


def _source_line(file: str, line: int, cells: Sources) -> str:
    linecache.checkcache(file)
    lines = cells[file].splitlines() if file in cells else linecache.getlines(file)
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""


def is_in(frames: Iterable[Frame], function: str) -> bool:
    """Whether a function of that name is among these frames."""
    return any(frame.function == function for frame in frames)


def is_pairwise(frames: Iterable[Frame]) -> bool:
    """Whether these frames wait in a blocking send or receive."""
    return _match(frames, _PAIRWISE)


def calls_torch_distributed(frames: Iterable[Frame]) -> bool:
    """Whether these frames are in torch.distributed, and do not only ask about the process group."""
    return any(_IN_DISTRIBUTED.search(frame.file) and not _ASKS.search(frame.function) for frame in frames)


def is_in_loader(frames: Iterable[Frame]) -> bool:
    """Whether these frames wait for a DataLoader's worker."""
    return _match(frames, _IN_LOADER)


def is_joining(frames: Sequence[Frame], once_more: bool) -> bool:
    """Whether these frames wait for a process group to come up (`once_more`: a later one)."""
    if once_more:
        return is_in(frames, "init_process_group")
    return not frames or any(_JOINING.search(frame.function) for frame in frames)


def ends_in_torch(frames: Sequence[Frame]) -> bool:
    """Whether a traceback (outermost first) ends in torch.distributed or in a backward."""
    inner = _inner(frames[::-1])
    return is_in(inner, BACKWARD) or _match(inner, _IN_DISTRIBUTED)


def _inner(frames: Sequence[Frame]) -> list[Frame]:
    """The first frames, until one is the user's own."""
    return list(itertools.takewhile(lambda frame: not frame.own, frames))
