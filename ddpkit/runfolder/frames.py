"""Reads the lines of tracebacks and stack dumps, and tells which are the user's own."""

from __future__ import annotations

import itertools
import linecache
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import wire

_FRAME = re.compile(
    r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$(?:\n    (?P<source>\S.*)$)?', re.MULTILINE
)
# "<string>" is the code that Python makes up for a spawned process.
_NOT_OWN = re.compile(
    r"site-packages|dist-packages|/lib/python|<frozen|<string>|[/\\]ddpkit[/\\](rank|recorder|processes)[/\\]"
)
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
    """One line of a traceback. `own`: the user's code rather than Python's, a package's or ddpkit's."""

    file: str
    line: int
    function: str
    source: str
    own: bool = True

    @property
    def name(self) -> str:
        """The function's name without its class, which only some tracebacks have."""
        return self.function.rpartition(".")[2]

    @property
    def text(self) -> str:
        """`line 19: loss = net(x).mean()`, counted as in the cell or script."""
        if self.source:
            return f"line {self.line}: {_ALIGNED.sub('  ', self.source)}"
        return f"line {self.line} of {Path(self.file).name}"


def stack_frames(dump: str, cells: dict[str, str]) -> list[Frame]:
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
    frames = _frames(chosen, cells)
    if not chosen.startswith("Thread MainThread") or not _waits_for_a_thread(frames):
        return frames
    others = []
    for thread in threads:
        beside = _frames(thread, cells)
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


def _frames(thread: str, cells: dict[str, str]) -> list[Frame]:
    frames = []
    for found in _FRAME.finditer(thread):
        file, line, function = found["file"], int(found["line"]), found["function"]
        frames.append(Frame(file, line, function, found["source"] or _source_line(file, line, cells), is_own(file)))
    return frames


def is_own(file: str) -> bool:
    """Whether `file` is the user's code rather than Python's, a package's or ddpkit's."""
    return not _NOT_OWN.search(file) and Path(file).name != wire.FUNCTION_SCRIPT


def _waits_for_a_thread(frames: Sequence[Frame]) -> bool:
    inner = _inner(frames)
    if not inner:
        return bool(frames) and ".acquire(" in frames[0].source
    return bool(_FOR_A_THREAD.search(inner[0].file)) and not _match(inner, _LOADER)


def with_sources(dump: str, cells: dict[str, str]) -> str:
    """`dump` with the source line below each frame: the file may change before it is read again."""

    def with_source(found: re.Match[str]) -> str:
        source = found["source"] or _source_line(found["file"], int(found["line"]), cells)
        frame = found[0].partition("\n")[0]
        return f"{frame}\n    {source}" if source else frame

    return _FRAME.sub(with_source, dump)


def _source_line(file: str, line: int, cells: dict[str, str]) -> str:
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
