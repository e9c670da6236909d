"""Reads how a rank failed: from its own record, or from the stack that faulthandler left."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from . import wire
from .frames import Frame, Sources, frames_of, read_frame, stack_frames
from .stable import shortened, stable

# The ways in which a program ends itself: the record's name, and how code spells it.
LEAVES = {
    "SystemExit": "sys.exit",
    "os._exit": "os._exit",
    "os.abort": "os.abort",
    "dump_traceback_later": "faulthandler.dump_traceback_later",
}
_MOST_NAMES = 6
_PRINTED = re.compile(
    r"^Traceback \(most recent call last\):\n(?P<stack>(?: .*\n)+)(?:\w+\.)*(?P<type>\w+)(?:: (?P<message>.*))?\n?",
    re.MULTILINE,
)
# So many lines may follow the traceback that a program printed before it left.
_LAST_LINES = 5
# What torch says to a rank that lost a peer, and to one that gave up waiting.
_PEER_LOST = re.compile(
    r"gloo/transport/.*(closed by peer|reset by peer|Broken pipe)"
    r"|DistNetworkError: (Broken pipe|Connection reset by peer)"  # of a store
    r"|Application timeout caused pair closure"
    r"|ncclRemoteError|remote process exited or there was a network error"
    r"|Connection was likely closed\. Did the remote server shutdown or crash"
    r"|connectFullMesh failed.*Connection refused"
    r"|setup: rank \d+ failed in its setup"  # ddpkit.rank.setup, of another rank
    r"|Detected at least one rank that exhausted inputs\. Throwing across all ranks",
    re.DOTALL,
)
_GAVE_UP = re.compile(
    r"Timed out waiting \d+ms for (recv|send) operation"
    r"|RuntimeError: Operation timed out!"
    r"|Watchdog caught collective operation timeout"
    r"|wait timeout after \d+ms, keys"
    r"|RuntimeError: Wait timeout$"  # of a store in a file
    r"|DistStoreError: Socket Timeout$"  # of torch 2.4
    r"|client socket has timed out"
    r"|waiting for clients\. \d+/\d+ clients joined"
    r"|failed to pass monitoredBarrier"
)
# Ranks joined different collectives; none of these texts says which of them is wrong.
_PARTED = re.compile(
    r"op\.preamble\.length <= op\.nbytes"
    r"|Detected mismatch between collectives on ranks"
    r"|Error when verifying shape tensors for collective"
    r"|appears not to match (sizes|strides) of the same param in process 0"
    r"|DDP expects same model across all ranks"
)
# What a program raises on a healthy rank to report that another rank has failed.
_TELLS_OF_ANOTHER = re.compile(
    r"\b((an)?other|a|some|\d+) (rank|process|worker|replica|peer)(s|es|\(s\))? (ha[sd] |have )?"
    r"(failed|crashed|raised|aborted|died|reported)\b"
    r"|\bpeer (rank )?(has )?failed\b"
    r"|\b(failed|failure|error|exception) (on|in|of|from) (an)?other (rank|process|worker|replica|peer)",
    re.IGNORECASE,
)
# torch.distributed.checkpoint raises on every rank the errors of some; with `reduce_fun`, the error of the combined result.
FAILED_IN_CHECKPOINT = re.compile(r"^CheckpointException ranks:dict_keys\(\[([\d, ]+)\]\)(?!.*reduce_fun\()", re.DOTALL)


@dataclass(frozen=True)
class Failure:
    """How a rank failed: an uncaught exception, `sys.exit` with a text or code, `os._exit`, or a fatal signal.

    `at_ns`: the wall clock in nanoseconds before the rank cleaned up. `frames`: the traceback, outermost first; `where`:
    its innermost line of the user's code. `chain`: (type, message) of what the exception was raised from, nearest first;
    `began_with`: the last of these in words, with its line. `left_by`: how the program ended itself while it handled this
    exception, such as "sys.exit, exit code 1 (line 7: ...)".
    `at_fault`: the ranks that the exception blames, mostly (). `by_thread`: a thread other than the main one ended the
    rank, and `frames` is where the main one was. `released_others`: on its way out the rank joined a collective of
    all, so that others could go on. `nan_in`: the variables of the user's functions on the way that held nan.
    `without_gradient`: the parameters of which DDP says so. `came_later`: it opened a file
    that was not there, and that was written after that.
    """

    at_ns: int
    type: str
    message: str
    traceback: str
    frames: tuple[Frame, ...] = ()
    where: Frame | None = None
    chain: tuple[tuple[str, str], ...] = ()
    began_with: str = ""
    left_by: str = ""
    at_fault: tuple[int, ...] = ()
    by_thread: bool = False
    released_others: bool = False
    nan_in: tuple[str, ...] = ()
    without_gradient: tuple[str, ...] = ()
    came_later: bool = False

    @property
    def line_text(self) -> str:
        """`line 19: loss = net(x).mean()`, or "" if no line is known."""
        return self.where.text if self.where else ""

    @property
    def text(self) -> str:
        """`ValueError: boom`: one line, without what varies between runs."""
        message = shortened(stable(self.message))
        return f"{self.type}: {message}" if message else self.type

    @property
    def texts(self) -> list[str]:
        """`ValueError: boom` in full, then the exceptions that it was raised from."""
        return [f"{kind}: {message}" for kind, message in ((self.type, self.message), *self.chain)]

    @property
    def tells_of_another(self) -> bool:
        """Whether its message says that another rank failed."""
        return bool(_TELLS_OF_ANOTHER.search(self.message))

    @property
    def details(self) -> str:
        """`; it began with KeyError: 'x' (line 3: ...)`, and what else is known beside its text."""
        said = f"; it began with {self.began_with}" if self.began_with else ""
        if self.came_later:
            said += "; that file was written after this, so a barrier is missing before the load"
        if self.without_gradient:
            more = ", …" if len(self.without_gradient) > _MOST_NAMES else ""
            said += f"; no gradient came for {', '.join(self.without_gradient[:_MOST_NAMES])}{more}"
        return said


def said_of_others(texts: Sequence[str]) -> Literal["parted", "peer_lost", "gave_up", ""]:
    """What an error's texts say of another rank: it joined a different collective, it ended, or it did not come."""
    if any(map(_PARTED.search, texts)):
        return "parted"
    if any(map(_PEER_LOST.search, texts)):
        return "peer_lost"
    return "gave_up" if any(map(_GAVE_UP.search, texts)) else ""


def read_failure(own: Path, log: Path | None, ended: dict[str, Any], cells: Sources) -> Failure | None:
    """How the rank of folder `own` failed, or None.

    `log` is torchrun's log folder of the rank, `ended` its keeper's record, `cells` the sources of notebook cells.
    """
    # Without an exit record the keeper itself was killed; the rank's failure record still counts.
    written = wire.read_record(own / wire.FAILURE) if ended.get("exitcode", 1) != 0 else None
    if written:
        return _after_a_printed_one(_written_down(written, cells), log, cells)
    return _crash(own, ended, cells) or _timed_out(log, ended, cells)


def _after_a_printed_one(failure: Failure, log: Path | None, cells: Sources) -> Failure:
    """The same failure; if the program printed a traceback and then left by itself, the exception of that traceback.

    Example: `except Exception: logging.exception("aborted"); return 1`, and then `sys.exit(main())`. That traceback begins in
    the function that caught it. One that begins at the module's top may be of another process.
    """
    if failure.type not in LEAVES or failure.chain or failure.message == "exit code 0" or log is None:
        return failure
    text = wire.read_text(log / "stderr.log")[-100_000:]
    printed = next(reversed(list(_PRINTED.finditer(text))), None)
    if printed is None or text.count("\n", printed.end()) > _LAST_LINES:
        return failure
    frames = tuple(frames_of(printed["stack"], cells))
    own = [frame for frame in frames if frame.own]
    if frames[:1] != tuple(own[:1]) or own[0].function == "<module>":
        return failure
    place = f" ({failure.where.text})" if failure.where else ""
    return replace(
        failure,
        type=printed["type"],
        message=printed["message"] or "",
        traceback=printed[0],
        frames=frames,
        where=own[-1],
        left_by=f"{LEAVES[failure.type]}, {failure.message}{place}",
    )


def _written_down(record: dict[str, Any], cells: Sources) -> Failure:
    """The failure of a record. A program that catches an exception and ends itself has failed by that exception."""
    where, left_by = read_frame(record.get("where"), cells), ""
    if record["type"] in LEAVES and record["chain"] and record["chain"][0].get("where"):
        place = f" ({where.text})" if where else ""
        left_by = f"{LEAVES[record['type']]}, {record['message']}{place}"
        caught, *rest = record["chain"]
        record = {**record, "type": caught["type"], "message": caught["message"], "chain": rest}
        where = read_frame(caught["where"], cells)
    frames = []
    for each in record["frames"]:
        if frame := read_frame(each, cells):
            frames.append(frame)
    return Failure(
        at_ns=record["at_ns"],
        type=record["type"],
        message=record["message"],
        traceback=record["traceback"],
        frames=tuple(frames),
        where=where,
        chain=tuple((c["type"], c["message"]) for c in record["chain"]),
        left_by=left_by,
        began_with=_first_of(record["chain"], cells),
        at_fault=tuple(record.get("at_fault", ())),
        by_thread=record.get("by_thread", False),
        released_others=record.get("let_go", False),
        nan_in=tuple(record.get("nan_in", ())),
        without_gradient=tuple(record.get("without_gradient", ())),
        came_later=record.get("came_later", False),
    )


def note_files_that_came_later(folder: Path, ranks: Iterable[Path]) -> None:
    """Look whether the files that ranks did not find were written after that, while the job of `folder` still ran."""
    cwd = (wire.read_record(folder / wire.JOB) or {}).get("cwd", "")
    for own in ranks:
        record = wire.read_record(own / wire.FAILURE) or {}
        missed = re.search(r"No such file or directory: '(.+)'$", record.get("message", ""))
        if missed and wire.written_ns(Path(cwd, missed[1])) > record["at_ns"]:
            wire.write_record(own / wire.FAILURE, record | {"came_later": True})


def _first_of(chain: list[dict[str, Any]], cells: Sources) -> str:
    """`ValueError: label 7 (line 13: ...)`, the first exception of a chain; "" if the user's code did not raise it."""
    where = read_frame(chain[-1].get("where"), cells) if chain else None
    if where is None:
        return ""
    message = shortened(stable(chain[-1]["message"]))
    return f"{chain[-1]['type']}: {message}".rstrip(": .") + f" ({where.text})"


def _crash(own: Path, ended: dict[str, Any], cells: Sources) -> Failure | None:
    """A death by a signal that torchrun did not send, with faulthandler's stack if any."""
    if not ended.get("signal") or ended.get("told"):
        return None
    crash = wire.read_text(own / wire.CRASH)
    frames = stack_frames(crash, cells)
    where = next((f for f in frames if f.own), frames[0] if frames else None)
    message = crash.partition("\n")[0] if crash.startswith("Fatal") else ""
    return Failure(ended["at_ns"], ended["signal"], message, crash, tuple(reversed(frames)), where)


def _timed_out(log: Path | None, ended: dict[str, Any], cells: Sources) -> Failure | None:
    """An end by `faulthandler.dump_traceback_later(..., exit=True)`, read from the end of stderr."""
    if log is None or ended.get("exitcode") != 1 or ended.get("told"):
        return None
    _, header, dump = f"\n{wire.read_text(log / 'stderr.log')[-100_000:]}".rpartition("\nTimeout (")
    message, _, stacks = dump.partition("\n")
    if not header or not re.match(r"[\d:.]+\)!$", message) or not stacks.startswith("Thread 0x"):
        return None
    frames = stack_frames(stacks, cells)
    where = next((f for f in frames if f.own), None)
    return Failure(
        ended["at_ns"], "dump_traceback_later", f"Timeout ({message}", stacks, tuple(reversed(frames)), where
    )
