"""Says where each rank stood when it was looked at: in which collective it waits, or what it does instead of waiting."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ddpkit.runfolder import wire
from ddpkit.runfolder.calls import Collective
from ddpkit.runfolder.frames import Frame
from ddpkit.runfolder.ranks import Rank

from .endings import classify
from .finding import ranks_said, verb

Kind = Literal["left", "late", "stopped", "waiting", "joining", "loading", "busy", "idle", "unknown"]

# With more ranks than cores each gets a part of one; a rank that sleeps or polls uses next to nothing.
BUSY_FROM = 0.15
# A call that was over sooner may have gone on by itself, as with async_op=True.
WAITS_FROM_S = 1.0
# A rank that waits for less than this is in the middle of an ordinary step.
STILL_FROM_S = 2.0
# Where a program meets a collective that it began earlier; on a GPU that is at any look at a value.
_AWAITING = re.compile(r"\.(wait|synchronize|item|tolist|cpu|numpy)\(")
# Waits in C++ that nothing else records: for a send or receive that was begun, and for a key of the store.
_UNRECORDED = re.compile(r"\.(wait|synchronize)\(|store\w*\.get\(")
_STORE = re.compile(r"store\w*\.(get|wait)\(")
_WATCHDOG = re.compile(
    r"(?:PG (?:ID|GUID) (?P<group>\d+).*?)?Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)"
)
_JOINING = re.compile(r"\b(init_process_group|rendezvous|_store_based_barrier|_create_c10d_store)\b")
_WAITING = re.compile(r"torch.distributed.(distributed_c10d|nn|_functional_collectives)")
# What only asks the process group about itself, as a loader does, waits for nobody.
_ASKS = re.compile(r"(^|\.)(_?(is|get)_\w+|default_pg|WORLD)$")
# A loader without workers has other functions: there the rank itself reads.
_LOADING = re.compile(
    r"torch.utils.data.dataloader\.py (\w+\.)*(_(try_)?get_data|_shutdown_workers)$|_MultiProcessingDataLoaderIter\."
)
_BACKWARD = "_engine_run_backward"


@dataclass(frozen=True)
class Standing:
    """Where one rank stands: in which way, at which of the user's own lines, and in which collective if it waits in one.

    `pairwise`: it waits for a send or a receive, so that not everybody need come.
    """

    rank: Rank
    kind: Kind
    place: Frame | None = None
    collective: Collective | None = None
    pairwise: bool = False

    @property
    def at_disk(self) -> bool:
        """Whether it waits for a disk or a network file system: the system's word for a process that cannot be interrupted."""
        return self.kind == "idle" and self.rank.look is not None and self.rank.look.state == "disk-sleep"

    @property
    def words(self) -> str:
        """`waits in all_reduce #9`, `idle at line 40: time.sleep(60)`."""
        at = f" at {self.place.text}" if self.place else ""
        if self.kind == "waiting" and self.collective:
            return f"waits in {self.collective.name}"
        if self.kind == "waiting":
            return f"waits{for_a_key([self]) or _for_peers(self)}{at}"
        said: dict[Kind, str] = {
            "left": "has left",
            "late": "came only after that",
            "stopped": f"is stopped (SIGSTOP){at}",
            "joining": f"waits for the others to join{at}",
            "loading": f"waits for its DataLoader worker{at}",
            "busy": f"computes{at}",
            "idle": f"waits for the disk{at}" if self.at_disk else f"sits{at}" if at else _without_a_line(self.rank),
        }
        if self.kind == "idle" and (inside := _inside(self.rank)):
            return f"{said['idle']}, inside {inside} with the GIL"
        return said.get(self.kind, "is somewhere unknown")


def standings(ranks: Sequence[Rank], at_ns: int | None = None) -> dict[int, Standing]:
    """Where each rank stands, by rank; or where it stood at `at_ns`, when the first wait was given up."""
    at = {rank.rank: standing(rank, at_ns) for rank in ranks}
    return {number: _with_what_it_awaits(s, at, at_ns) for number, s in at.items()}


def _with_what_it_awaits(standing: Standing, at: Mapping[int, Standing], at_ns: int | None) -> Standing:
    """Of a rank that gave up a wait for what it had begun at an earlier line, or caught that and left or raised at a later one,
    the first collective to which others have not come; its own record has all of them as done by then."""
    rank, waits = standing.rank, standing.kind == "waiting" and not standing.pairwise
    if standing.collective or not waits or not rank.failure:
        return standing
    awaits = standing.place and _AWAITING.search(standing.place.source)
    caught = (
        rank.failure.chain and rank.collectives[-1:] == rank.calls[-1:] and classify(rank) in ("gave_up", "peer_lost")
    )
    begun = rank.collectives if awaits else rank.collectives[-1:] if caught else ()
    known = (replace(standing, collective=collective) for collective in begun)
    return next((s for s in known if missing_in(s, at, at_ns)), standing)


def standing(rank: Rank, at_ns: int | None = None) -> Standing:
    """Where this rank stands; for one that has ended, where it stood when it failed."""
    waiting = _open_collective(rank)
    if at_ns and any(c.at_ns > at_ns for c in rank.collectives):
        return Standing(rank, "late")
    if at_ns and rank.failure is None and (was_in := _was_in(rank, at_ns)):
        return Standing(rank, "waiting", was_in.where, was_in)
    if rank.exitcode == 0:
        return Standing(rank, "left", collective=waiting)
    if rank.failure is not None:
        kind: Kind = "waiting" if _joined(rank) else "joining"
        pairwise = _is_pairwise(rank.failure.frames) or (waiting is None and bool(rank.requested))
        return Standing(rank, kind, rank.failure.where, None if pairwise else waiting or _given_up(rank), pairwise)
    if rank.look is None:
        return Standing(rank, "unknown")
    frames, place = rank.stack_frames, rank.at
    if rank.look.state == "stopped":
        return Standing(rank, "stopped", place, waiting)
    # The stack says what the rank itself does; a collective that runs beside it holds nobody up.
    if rank.joining and _is_joining(rank, frames):
        return Standing(rank, "joining", place or rank.joining.where)
    inner = list(itertools.takewhile(lambda frame: not frame.own, frames))
    if any(_LOADING.search(f"{f.file} {f.function}") for f in inner):
        return Standing(rank, "loading", place, waiting)
    if rank.awaited:
        return Standing(rank, "waiting", place, None, pairwise=True)
    if pairwise := _is_pairwise(inner):
        return Standing(rank, "waiting", place, None, pairwise)
    in_torch = (f for f in inner if _WAITING.search(f.file))
    if any(not _ASKS.search(f.function) for f in in_torch) or _waits_unseen(rank, inner, place, waiting):
        return Standing(rank, "waiting", place, waiting, pairwise=waiting is None and not inner)
    if not frames:
        return Standing(rank, "unknown")
    # A GPU that computes while no collective is open computes for this rank; an open one keeps it busy by waiting.
    on_gpu = 0.0 if waiting else rank.look.gpu_busy or 0.0
    return Standing(rank, "busy" if max(rank.look.busy, on_gpu) >= BUSY_FROM else "idle", place, waiting)


def _was_in(rank: Rank, at_ns: int) -> Collective | None:
    """The collective in which this rank was at that time, and from which it came back: as who catches the error of a wait."""
    return next((c for c in rank.collectives if c.at_ns <= at_ns < c.over_ns), None)


def _inside(rank: Rank) -> str:
    """The innermost C++ function of torch's in which this rank sleeps with the GIL; "" where it does not."""
    return next((name for name in rank.look.inside if name.startswith(("c10", "torch", "at"))), "") if rank.look else ""


def _without_a_line(rank: Rank) -> str:
    """What an idle rank does that is in no line of the user's."""
    functions = {frame.function for frame in rank.stack_frames}
    if "_shutdown" in functions:
        return "has come to the end of its script, and Python waits for a thread of it"
    if functions & {"_exit_function", "poll"}:
        return "has come to the end of its script, and Python waits for a child process of it"
    return "sits"


def unmoved_s(rank: Rank) -> float:
    """Seconds for which this rank had not moved when it was looked at: since its last sign of progress or, where it waits in
    a collective, since it joined that, whatever another thread of it may print."""
    if rank.look is None:
        return 0.0
    waits_in = standing(rank).collective
    waited_s = (rank.look.at_ns - waits_in.at_ns) / 1e9 if waits_in and not waits_in.done else 0.0
    return max(rank.look.silent_s, waited_s)


def _is_pairwise(frames: Sequence[Frame]) -> bool:
    return any(f.function in ("send", "recv") and _WAITING.search(f.file) for f in frames)


def may_wait(frames: Sequence[Frame]) -> bool:
    """Whether a rank with these frames, outermost first, was in torch.distributed or in a backward, below its own line."""
    inner = itertools.takewhile(lambda frame: not frame.own, reversed(frames))
    return any(f.function == _BACKWARD or _WAITING.search(f.file) for f in inner)


def _waits_unseen(rank: Rank, inner: Sequence[Frame], place: Frame | None, waiting: Collective | None) -> bool:
    """Whether a rank waits whose innermost call is none of torch.distributed's: in backward, at a look at a value.

    Backward may also compute. Where the collectives are known, one must be open; where they are not, the rank must be idle.
    A `wait` of Python's own, for a process or a thread, has frames below the user's line; torch's has none.
    """
    in_backward = any(f.function == _BACKWARD for f in inner)
    source = place.source if place and not inner else ""
    if waiting is None:
        idle = rank.look is not None and rank.look.busy < BUSY_FROM
        return idle and ((in_backward and not rank.collectives) or bool(_UNRECORDED.search(source)))
    if place is None:
        return True
    return in_backward or same_line(waiting.where, place) or bool(_AWAITING.search(source))


def _open_collective(rank: Rank) -> Collective | None:
    """The collective that has not come back: the first, of those that were begun at the line where the rank stands if any
    were. One that was begun earlier and is never waited for stays open too."""
    unfinished = [c for c in rank.collectives if not c.done]
    here = [c for c in unfinished if same_line(c.where, rank.at)]
    return next(iter(here or unfinished), None)


def same_line(one: Frame | None, other: Frame | None) -> bool:
    """Whether both are known and are the same line of the program."""
    return one is not None and other is not None and (one.file, one.line) == (other.file, other.line)


def _given_up(rank: Rank) -> Collective | None:
    """The collective that this rank waited in when it failed. One that was given up counts as done; of one that NCCL's
    watchdog gave up, only the process's last words tell."""
    failed = rank.failure.where if rank.failure else None
    last = rank.collectives[-1] if rank.collectives else None
    if last and same_line(last.where, failed):
        return last
    said = _WATCHDOG.search(rank.stderr[-20_000:])
    if said is None:
        return None
    op, group = said["op"].lower(), said["group"] or "0"
    return Collective(int(said["seq"]), op, group, "default_pg" if group == "0" else "", (), (), (), 0, False, failed)


def thread_died_of(rank: Rank) -> str:
    """What Python said on stderr of the first thread that ended by an exception; "" if none did."""
    _, died, said = rank.stderr.partition("Exception in thread ")
    return died and next((line for line in said.splitlines()[2:] if line[:1].strip()), "")


def _is_joining(rank: Rank, frames: Sequence[Frame]) -> bool:
    """Whether this rank waits for its process group to come up, for the first time or once more."""
    if _joined(rank):
        return any(frame.function == "init_process_group" for frame in frames)
    return not frames or any(_JOINING.search(frame.function) for frame in frames)


def _joined(rank: Rank) -> bool:
    """Whether this rank's process group came up: only then it can have answered for its collectives."""
    return bool(rank.collectives) or rank.joining is None or (rank.folder / wire.ASK).exists()


def is_in(standing: Standing, function: str) -> bool:
    """Whether this rank is in that function of torch.distributed, or failed in it."""
    failure = standing.rank.failure
    return any(frame.function == function for frame in (failure.frames if failure else standing.rank.stack_frames))


def instead(first: Standing, ranks: Sequence[int]) -> str:
    """What the ranks at fault do instead; the first speaks for all."""
    if first.kind == "left":
        return f"{'it' if len(ranks) == 1 else 'they'} {left_early(first.rank)}"
    return f"{'it' if len(ranks) == 1 else f'rank {first.rank.rank}'} {first.words}"


def left_early(rank: Rank) -> str:
    """`left early with exit code 0 at line 6: os._exit(0)`, where that line is known."""
    return f"left early with exit code 0{f' at {rank.left_at.text}' if rank.left_at else ''}"


def each(at: Mapping[int, Standing]) -> str:
    """`Rank 0 waits in all_reduce #9; rank 2 waits at line 12: dist.recv(x).`"""
    said = "; ".join(f"rank {n} {s.words}" for n, s in sorted(at.items()))
    return f"{said[:1].upper()}{said[1:]}."


def at_line(standing: Standing) -> str:
    return f" at {standing.place.text}" if standing.place else ""


def with_line(standing: Standing) -> str:
    """What this rank does, and at which line."""
    return f"{standing.words}{line_unsaid(standing)}"


def line_unsaid(standing: Standing) -> str:
    """Its line, where its words have a collective's name in place of that."""
    return at_line(standing) if standing.collective else ""


def is_at_a_key(standing: Standing) -> bool:
    """Whether this rank waits for a key of the store, and for whoever is to set it."""
    return bool(standing.rank.awaited) or (standing.place is not None and bool(_STORE.search(standing.place.source)))


def is_exchanging(standing: Standing) -> bool:
    """Whether this rank waits for a send or receive, or has given one up that it had begun."""
    calls = standing.rank.calls
    return standing.pairwise or (standing.collective is None and bool(calls) and calls[-1].is_exchange)


def kind_of_wait(standing: Standing) -> str:
    """The kind of a finding about a rank that never came to what this one waits in."""
    if is_at_a_key(standing):
        return "no_key"
    return "unmatched" if standing.pairwise and peers(standing) else "never_joined"


def for_a_key(waiting: Sequence[Standing]) -> str:
    """` for the key "size/3" of the store`, "" where it is not known, or not the same for all who wait."""
    first, *others = {s.rank.awaited for s in waiting} or {()}
    named = ", ".join(f'"{key}"' for key in first)
    return f" for the key{'s' if len(first) > 1 else ''} {named} of the store" if first and not others else ""


def _for_peers(waiter: Standing) -> str:
    """` for rank 0`, "" where no send or receive is known to be waited for."""
    met = peers(waiter) if waiter.pairwise else ()
    return f" for {ranks_said(sorted(met)).lower()}" if met else ""


def whom_it_waits_for(waiter: Standing) -> str:
    if waiter.collective:
        return f"{waiter.collective.name}{waiter.collective.from_line}"
    return f"what rank {waiter.rank.rank} waits for{at_line(waiter)}"


def missing_in(waiter: Standing, at: Mapping[int, Standing], at_ns: int | None) -> list[int]:
    """The ranks that have not joined what `waiter` waits in."""
    wanted = waiter.collective
    if waiter.pairwise:
        return [peer for peer in peers(waiter) if peer in at]
    if wanted is None:
        return [n for n, s in at.items() if s.kind != "waiting"]
    members = wanted.ranks or tuple(at)
    return [n for n in members if n in at and n != waiter.rank.rank and _last_joined(at[n], wanted, at_ns) < wanted.seq]


def peers(waiter: Standing) -> tuple[int, ...]:
    """The ranks that a wait for a send or receive may be for."""
    look, asked, calls = waiter.rank.look, waiter.rank.requested, waiter.rank.calls
    if look and look.peer is not None:
        return (look.peer,)
    # Beside one that blocks at this line, others go on by themselves.
    blocks = calls and calls[-1].op in ("send", "recv") and same_line(calls[-1].where, waiter.place)
    with_it = tuple(rank for rank in calls[-1].ranks if rank in asked) if blocks else ()
    return with_it or asked


def _last_joined(standing: Standing, wanted: Collective, at_ns: int | None) -> int:
    known = [c for c in standing.rank.collectives if not (at_ns and c.at_ns > at_ns)]
    joined = [c for c in known if (c.group, c.setup) == (wanted.group, wanted.setup)]
    return max((c.seq for c in joined), default=0)


def who_waits_there(waiting: Mapping[int, Standing]) -> str:
    """`Rank 0 waits there.`, or who waits where, if not all wait in the same collective."""
    if len({s.collective.name if s.collective else "" for s in waiting.values()}) > 1:
        return each(waiting)
    who = ranks_said(sorted(waiting))
    if any(s.rank.failure for s in waiting.values()):
        return f"{who} waited there in vain."
    return f"{who} {verb(waiting, 'waits', 'wait')} there."
