"""Reads the attempts and ranks of a run folder into plain data, without judging them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from . import wire
from .calls import Collective, Made, given_up_by_watchdog, read_made
from .failures import LEAVES, Failure, read_failure
from .folders import log_folder, log_text
from .frames import Frame, Sources, read_frame, sources, stack_frames
from .looks import Joining, Look, read_joining, read_look
from .stable import shortened, stable

# Exceptions that programs catch in normal operation.
_ORDINARY = ("StopIteration", "KeyError", "Empty")


@dataclass(frozen=True, repr=False)
class Rank:
    """One rank in one attempt, as recorded; a field is None if nothing was recorded.

    `exitcode` is -9 for a death by SIGKILL, as in `subprocess`; `signal` names it. `told`: the signal that torchrun or
    ddpkit sent to end it. `oom`: the kernel's line, if it killed the rank for memory. `finished_ns`: when its script
    ended; `left_at`: the line of the `sys.exit` that ended it. `node`: its host, if there are several agents. `words` and
    `role` (passed, culprit, own, consequence, unknown) come from the verdict.
    """

    rank: int
    local_rank: int
    attempt: int
    folder: Path
    log_folder: Path | None
    started_ns: int | None = None
    finished_ns: int | None = None
    left_at: Frame | None = None
    ended_ns: int | None = None
    pid: int | None = None
    stack_signal: int | None = None
    warm: bool | None = None
    node: str = ""
    master: str = ""
    world_size: int = 0
    exitcode: int | None = None
    signal: str | None = None
    told: str | None = None
    told_ns: int = 0
    killed_for: str = ""
    oom: str = ""
    failure: Failure | None = None
    peak_rss_mib: float | None = None
    words: str = ""
    role: str = "unknown"

    @property
    def plain_words(self) -> str:
        """How it ended, without saying whose fault it was."""
        failure = self.failure
        if failure and failure.type in LEAVES:
            return f"left by {LEAVES[failure.type]}, exit code {self.exitcode}"
        if failure and failure.type != self.signal:
            return f"raised {failure.type}"
        if self.signal:
            return f"ended by {self.signal}" if self.told else f"killed by {self.signal}"
        if self.exitcode is None:
            return "how it ended is not recorded"
        return "passed" if self.exitcode == 0 else f"exited with code {self.exitcode}"

    def __repr__(self) -> str:
        line = f", {self.failure.line_text}" if self.failure and self.failure.line_text else ""
        return f"rank {self.rank}: {self.words}{line}"

    @property
    def stdout(self) -> str:
        """The rank's whole standard output, from torchrun's log file; bad bytes are replaced."""
        return self._log("stdout")

    @property
    def stderr(self) -> str:
        """The rank's whole standard error, as `stdout`."""
        return self._log("stderr")

    @property
    def thread_died_of(self) -> str:
        """The exception of the first thread that died of one, from stderr; "" if none did."""
        _, died, said = self.stderr.partition("Exception in thread ")
        return died and next((line for line in said.splitlines()[2:] if line[:1].strip()), "")

    @property
    def log(self) -> str:
        """What the rank logged by `ddpkit.rank.log_to`; "" if it did not."""
        return wire.read_text(self.folder / wire.LOG)

    @property
    def stack(self) -> str:
        """The Python stacks of the last look, or of its crash; "" if there are none."""
        return wire.read_text(self.folder / wire.STACK) or wire.read_text(self.folder / wire.CRASH)

    @property
    def sources(self) -> Sources:
        """The texts that its job ran."""
        return sources(self.folder.parents[2])

    @cached_property
    def stack_frames(self) -> list[Frame]:
        """The frames of the main thread in `stack`, innermost first."""
        return stack_frames(self.stack, self.sources)

    @cached_property
    def helpers(self) -> list[list[Frame]]:
        """The frames of its DataLoader's workers, or of other processes that it waits for, innermost first."""
        return [stack_frames(stack, self.sources) for _pid, stack in (self.look.workers if self.look else ())]

    @property
    def frames(self) -> Sequence[Frame]:
        """The frames that it is in or failed in, outermost first."""
        return self.failure.frames if self.failure else self.stack_frames[::-1]

    @property
    def own_frames(self) -> list[Frame]:
        """The frames of the user's own code."""
        return [frame for frame in self.frames if frame.own]

    @property
    def path(self) -> list[str]:
        """The user's lines that it is in as `file:line`, innermost first."""
        return [f"{frame.file}:{frame.line}" for frame in reversed(self.own_frames)]

    @property
    def at(self) -> Frame | None:
        """The innermost line of the user's code in `stack`; None without a stack."""
        return next((f for f in self.stack_frames if f.own), None)

    @cached_property
    def look(self) -> Look | None:
        """The last look at this rank; None if there was none, or the job went on after it."""
        return read_look(self.folder / wire.LOOK)

    @cached_property
    def joining(self) -> Joining | None:
        """How it tried to join its process group; None if it never called `init_process_group`."""
        return read_joining(self.folder / wire.JOINING, self.sources)

    @cached_property
    def store(self) -> str:
        """The address of the last TCPStore that its program made or connected to; "" if none."""
        return str((wire.read_record(self.folder / wire.STORE) or {}).get("address", ""))

    @cached_property
    def came_up(self) -> bool:
        """Whether its process group came up, so that it can be asked for its collectives."""
        return bool(self.collectives) or self.joining is None or (self.folder / wire.ASK).exists()

    @cached_property
    def made(self) -> Made:
        """Its calls as last recorded: when it was asked, or as it failed or ended."""
        asked, own = self.folder / wire.COLLECTIVES_ASKED, self.folder / wire.COLLECTIVES
        ended = self.failure is not None or self.exitcode == 0
        return read_made(own if (ended and own.exists()) or not asked.exists() else asked, self.sources)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives that this rank joined, oldest first, as last recorded."""
        return self.made.collectives

    @property
    def calls(self) -> tuple[Collective, ...]:
        """The collectives, sends and receives that this rank began, in order."""
        return self.made.calls

    def exchanged_with(self, peer: int, op: str) -> list[Collective]:
        """Its sends to that rank or receives from it, in order; `op` is "send" or "recv"."""
        return [c for c in self.calls if c.is_exchange and op in c.op and c.ranks == (peer,)]

    def joined(self, call: Collective) -> Collective | None:
        """This rank's own call of the same collective; None if it never joined it."""
        for own in self.collectives:
            if own.key == call.key:
                return own
        return None

    def goes_back_to(self, call: Collective) -> bool:
        """Whether its record reaches back to that collective: only the last 2000 are kept."""
        for own in self.collectives:
            if (own.group, own.setup) == (call.group, call.setup):
                return own.seq <= call.seq
        return True

    @cached_property
    def awaited(self) -> tuple[str, ...]:
        """The store keys that this rank waits for, or waited for when it failed."""
        last = self.made.keyed[-1] if self.made.keyed else None
        failed_at = self.failure.where if self.failure else None
        failed_there = failed_at is not None and last is not None and last.op != "set" and last.where == failed_at
        return self.made.last_keys if failed_there else self.made.awaited

    @cached_property
    def signals_sent(self) -> dict[tuple[int | None, str], Frame | None]:
        """The signals that it sent by `os.kill`: (pid, name) to the line."""
        sent = (wire.read_record(self.folder / wire.SENT) or {}).get("sent", ())
        return {(s["pid"], s["signal"]): read_frame(s["where"], self.sources) for s in sent}

    @cached_property
    def handling(self) -> str:
        """`ValueError: boom (line 7: raise ValueError("boom"))`: the exception that it handled.

        At a look, or when it failed with another one: then the first of the chain. "" if none, or an everyday one.
        """
        if self.failure is not None:
            chain = [f"{kind}: {text}" for kind, text in self.failure.chain if kind not in _ORDINARY]
            return shortened(stable(chain[-1])) if chain else ""
        handled = (wire.read_record(self.folder / wire.COLLECTIVES_ASKED) or {}).get("handling")
        if not handled or handled["type"] in _ORDINARY:
            return ""
        said = f"{handled['type']}: {shortened(stable(handled['message']))}".rstrip(": ")
        where = read_frame(handled["where"], self.sources)
        return f"{said} ({where.text})" if where else said

    @property
    def collective(self) -> Collective | None:
        """The collective that this rank waits in; if it waits in none, the last that it joined."""
        waiting = [c for c in self.collectives if not c.done]
        return waiting[0] if waiting else self.collectives[-1] if self.collectives else None

    @cached_property
    def given_up(self) -> Collective | None:
        """The collective in which this rank failed, by its line or by NCCL's watchdog."""
        failed = self.failure.where if self.failure else None
        last = self.collectives[-1] if self.collectives else None
        if last and last.where and failed and (last.where.file, last.where.line) == (failed.file, failed.line):
            return last
        return given_up_by_watchdog(self.stderr[-20_000:], failed)

    @cached_property
    def reports(self) -> tuple[dict[str, Any], ...]:
        """Every `ddpkit.rank.report(...)` of this rank, in order."""
        found = []
        for line in wire.read_text(self.folder / wire.REPORTS).splitlines():
            try:
                found.append(json.loads(line)["values"])
            except (ValueError, KeyError):
                continue
        return tuple(found)

    @property
    def reported(self) -> dict[str, Any]:
        """The latest value of each name that this rank reported."""
        return {name: value for report in self.reports for name, value in report.items()}

    def _log(self, stream: str) -> str:
        return log_text(self.log_folder / f"{stream}.log") if self.log_folder else ""


def read_attempts(folder: Path) -> tuple[tuple[Rank, ...], ...]:
    """The ranks of each attempt of the job in `folder`, in order; a restart makes a new attempt."""
    found = sorted((folder / "ranks").glob("attempt_*"), key=_number)
    cells = sources(folder)
    return tuple(tuple(_read_rank(folder, p, cells) for p in sorted(a.glob("rank_*"), key=_number)) for a in found)


def _number(path: Path) -> int:
    return int(path.name.rsplit("_", 1)[1])


def _read_rank(folder: Path, own: Path, cells: Sources) -> Rank:
    ended = wire.read_record(own / wire.EXIT) or {}
    attempt, rank = _number(own.parent), _number(own)
    started = {"local_rank": rank, **(wire.read_record(own / wire.STARTED) or {})}
    log = log_folder(folder, attempt, started)
    finished = wire.read_record(own / wire.FINISHED) or {}
    return Rank(
        rank=rank,
        local_rank=started["local_rank"],
        attempt=attempt,
        folder=own,
        log_folder=log,
        started_ns=started.get("at_ns"),
        finished_ns=finished.get("at_ns"),
        left_at=read_frame(finished.get("left_at"), cells),
        ended_ns=ended.get("at_ns"),
        pid=started.get("pid"),
        stack_signal=started.get("stack_signal"),
        warm=started.get("warm"),
        node=started.get("node", ""),
        master=started.get("master", ""),
        world_size=started.get("world_size", 0),
        exitcode=ended.get("exitcode"),
        signal=ended.get("signal"),
        told=ended.get("told"),
        told_ns=ended.get("told_ns", 0),
        killed_for=ended.get("killed_for", ""),
        oom=ended.get("oom", ""),
        failure=read_failure(own, log, ended, cells),
        peak_rss_mib=ended.get("peak_rss_mib"),
    )
