"""How each rank ended: by its own failure, or because of another rank. Question 1 of docs/verdict.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ddpkit.runfolder.calls import Collective, first_split
from ddpkit.runfolder.failures import FAILED_IN_CHECKPOINT, LEAVES, Failure, said_of_others
from ddpkit.runfolder.frames import Frame, ends_in_torch
from ddpkit.runfolder.ranks import Rank

from .places import STILL_FROM_S, WAITS_FROM_S, place_of

End = Literal["passed", "own", "parted", "peer_lost", "gave_up", "reported", "was_ended", "unknown"]

_LAST_WORDS = 4_000
_NEED_ALL = ("barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def ends(ranks: Sequence[Rank]) -> dict[int, End]:
    """How each rank ended, by rank."""
    found = {rank.rank: end_of(rank, ranks) for rank in ranks}
    reports = [r.rank for r in ranks if found[r.rank] == "own" and r.failure and r.failure.tells_of_another]
    if len(reports) < len(ranks):
        found |= dict.fromkeys(reports, "reported")
    return found


def end_of(rank: Rank, ranks: Sequence[Rank]) -> End:
    """How one rank ended, taking the other ranks into account.

    Example: rank 0 raises KeyError after an all_reduce that rank 1 never joined: "gave_up", not "own".
    """
    end = own_end(rank)
    if end != "own":
        return end
    if ended_its_own_wait(rank, ranks):
        return "gave_up"
    if _met_another_collective(rank, ranks):
        return "parted"
    loss = returned_alone(rank, ranks)
    return loss[0] if loss else "own"


def own_end(rank: Rank) -> End:
    """How a rank ended, according to its own record alone."""
    if rank.exitcode == 0:
        # Its SIGTERM handler may leave with 0.
        return "was_ended" if rank.told and (rank.finished_ns or rank.told_ns) >= rank.told_ns else "passed"
    if rank.failure and not (rank.told and rank.told_ns < rank.failure.at_ns):
        return end_by(rank.failure, rank)
    if rank.told:
        return "was_ended"
    return "own" if rank.exitcode is not None else "unknown"


def end_by(failure: Failure, rank: Rank) -> End:
    """Whether a failure is the rank's own or follows from another rank that ended or did not answer."""
    if failure.at_fault and rank.rank not in failure.at_fault:
        return "gave_up"
    failed = FAILED_IN_CHECKPOINT.match(failure.message)
    if failed and str(rank.rank) not in failed[1].split(", "):
        return "peer_lost"
    said = failure.texts
    # A C++ thread that finds a connection closed aborts or crashes the process; its message is on stderr.
    if failure.type in ("SIGABRT", "SIGSEGV"):
        said.append(rank.stderr[-_LAST_WORDS:])
    means = said_of_others(said)
    return "own" if not means or (failure.type == "SIGSEGV" and means != "parted") else means


def failed_at(rank: Rank) -> int:
    """When a rank failed, or ended, in nanoseconds of the wall clock."""
    return rank.failure.at_ns if rank.failure else rank.ended_ns or 0


def sent_by(rank: Rank, name: str, ranks: Sequence[Rank]) -> tuple[int, Frame | None] | None:
    """The rank that sent this one a signal, with the line that did so; None if no other rank did."""
    for other in ranks:
        if other is not rank and (rank.pid, name) in other.signals_sent:
            return other.rank, other.signals_sent[rank.pid, name]
    return None


def ended_its_own_wait(rank: Rank, ranks: Sequence[Rank]) -> bool:
    """Whether the program's own watchdog or alarm ended a rank during a wait that others had not joined.

    Example: rank 0 waits in all_reduce #4, and a watchdog thread of its program calls os.abort(): it gave up.
    """
    failure, here = rank.failure, place_of(rank)
    if failure is None:
        return False
    by_alarm = failure.type in ("SIGALRM", "dump_traceback_later")
    if not (failure.by_thread or by_alarm or failure.type in LEAVES or "Timeout" in failure.type):
        return False
    if here.pairwise:
        return failure.by_thread and bool(rank.calls) and _waited_s(failure, rank.calls[-1]) >= STILL_FROM_S
    if here.collective is None:
        return by_alarm and ends_in_torch(failure.frames)
    if _waited_s(failure, here.collective) < STILL_FROM_S:
        return False
    joined = [other.joined(here.collective) for other in members(here.collective, ranks)]
    return any(theirs is None or not theirs.matches(here.collective) for theirs in joined)


def _met_another_collective(rank: Rank, ranks: Sequence[Rank]) -> bool:
    """Whether torch.distributed failed in a rank, in or after a collective that another rank had joined as a different one.

    Example: rank 0 joins all_gather #1, rank 1 all_gather_object #1; rank 1 reads a size of 4e18 bytes, and runs out of memory.
    """
    if rank.failure is None or not ends_in_torch(rank.failure.frames):
        return False
    split = first_split({other.rank: other.collectives for other in ranks})
    return rank.rank in split and split[rank.rank].at_ns <= rank.failure.at_ns


def members(call: Collective, ranks: Sequence[Rank]) -> list[Rank]:
    """The ranks of the process group in which a collective was called."""
    return [rank for rank in ranks if not call.ranks or rank.rank in call.ranks]


def _waited_s(failure: Failure, call: Collective) -> float:
    return (failure.at_ns - call.at_ns) / 1e9


def returned_alone(rank: Rank, ranks: Sequence[Rank]) -> tuple[End, int] | None:
    """How and when a rank returned from a collective that a member never joined; None if it did not.

    Example: rank 0 catches the error of all_reduce #4, which rank 1 never joined, and raises KeyError later.
    """
    for call in rank.collectives:
        if not call.op.startswith(_NEED_ALL):
            continue
        for other in members(call, ranks):
            if other is rank or not other.goes_back_to(call):
                continue
            theirs = other.joined(call)
            if came_back_without(call, theirs):
                return "gave_up", call.over_ns
            if theirs is None and _was_gone(other, call, rank):
                return "peer_lost", call.over_ns
    return None


def came_back_without(call: Collective, theirs: Collective | None) -> bool:
    """Whether a long wait ended before the other rank joined, or although it joined something else."""
    if not call.over_ns or (call.over_ns - call.at_ns) / 1e9 < WAITS_FROM_S:
        return False
    return theirs is None or theirs.at_ns > call.over_ns or not theirs.matches(call)


def _was_gone(other: Rank, call: Collective, rank: Rank) -> bool:
    """Whether the other rank had ended when this one returned from the collective, before its own failure."""
    ended = failed_at(other)
    if not ended or call.at_ns >= failed_at(rank) or ended >= failed_at(rank):
        return False
    return not call.over_ns or call.over_ns >= ended
