"""How a rank failed: as it wrote that down itself, or by the stack that a fatal signal or faulthandler's timeout left."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import wire
from .frames import Frame, stack_frames
from .stable import shortened, stable

# How a program leaves by itself, as the record calls it, and as it is written.
LEAVES = {
    "SystemExit": "sys.exit",
    "os._exit": "os._exit",
    "os.abort": "os.abort",
    "dump_traceback_later": "faulthandler.dump_traceback_later",
}


@dataclass(frozen=True)
class Failure:
    """How a rank failed by itself: an uncaught exception, `sys.exit` with a text or code, `os._exit`, or a fatal signal.

    `at_ns` is the wall clock in nanoseconds, taken before the rank cleaned up; `chain` holds what the exception was
    raised from, nearest first, as (type, message); `where` is the innermost line of the user's own code; `at_fault` are the
    ranks that the exception itself names, () for nearly all. `by_thread`: another thread than the main one left by `os._exit` or
    `os.abort`, while the main one was in `frames`. `let_go`: it came to a collective of all on its way out, and let others go on.
    `nan_in` are the variables of the user's own functions on the way to it that held nan.
    """

    at_ns: int
    type: str
    message: str
    traceback: str
    frames: tuple[Frame, ...] = ()
    where: Frame | None = None
    chain: tuple[tuple[str, str], ...] = ()
    at_fault: tuple[int, ...] = ()
    by_thread: bool = False
    let_go: bool = False
    nan_in: tuple[str, ...] = ()

    @property
    def line_text(self) -> str:
        """`line 19: loss = net(x).mean()`, or "" when no line is known."""
        return self.where.text if self.where else ""

    @property
    def text(self) -> str:
        """`ValueError: boom`, on one line, without what varies between runs."""
        message = shortened(stable(self.message))
        return f"{self.type}: {message}" if message else self.type


def read_failure(own: Path, log: Path | None, ended: dict[str, Any], cells: dict[str, str]) -> Failure | None:
    """How the rank with the folder `own` failed, None where it did not: `log` is its folder of torchrun's logs, `ended` what
    its keeper wrote as it ended, `cells` are the sources of a notebook's cells."""
    # Without an exit record the keeper itself was killed; a failure record of its rank still stands.
    written = wire.read_record(own / wire.FAILURE) if ended.get("exitcode", 1) != 0 else None
    return _written_down(written) if written else _crash(own, ended, cells) or _timed_out(log, ended, cells)


def _written_down(record: dict[str, Any]) -> Failure:
    where = record.get("where")
    return Failure(
        at_ns=record["at_ns"],
        type=record["type"],
        message=record["message"],
        traceback=record["traceback"],
        frames=tuple(Frame(**f) for f in record["frames"]),
        where=Frame(**where) if where else None,
        chain=tuple((c["type"], c["message"]) for c in record["chain"]),
        at_fault=tuple(record.get("at_fault", ())),
        by_thread=record.get("by_thread", False),
        let_go=record.get("let_go", False),
        nan_in=tuple(record.get("nan_in", ())),
    )


def _crash(own: Path, ended: dict[str, Any], cells: dict[str, str]) -> Failure | None:
    """A death by signal that nobody had sent to end the job, with the stack that faulthandler left, if it could."""
    if not ended.get("signal") or ended.get("told"):
        return None
    crash = wire.read_text(own / wire.CRASH)
    frames = stack_frames(crash, cells)
    where = next((f for f in frames if f.own), frames[0] if frames else None)
    message = crash.partition("\n")[0] if crash.startswith("Fatal") else ""
    return Failure(ended["at_ns"], ended["signal"], message, crash, tuple(reversed(frames)), where)


def _timed_out(log: Path | None, ended: dict[str, Any], cells: dict[str, str]) -> Failure | None:
    """An end by `faulthandler.dump_traceback_later(..., exit=True)`, by what it writes last."""
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
