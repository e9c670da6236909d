"""Where each rank is: in which collective it waits, or what it does instead of waiting."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddpkit.runfolder.calls import Collective
from ddpkit.runfolder.frames import (
    BACKWARD,
    Frame,
    calls_torch_distributed,
    is_in,
    is_in_loader,
    is_joining,
    is_pairwise,
)
from ddpkit.runfolder.ranks import Rank

Kind = Literal["left", "late", "stopped", "waiting", "joining", "loading", "busy", "idle", "unknown"]

# With more ranks than cores each gets a part of one; a rank that sleeps or polls uses next to nothing.
BUSY_FROM = 0.15
# A call that was over sooner may have gone on by itself, as with async_op=True.
WAITS_FROM_S = 1.0
# A rank that waits for less than this is in the middle of an ordinary step.
STILL_FROM_S = 2.0

# Where a program meets a collective that it began earlier; on a GPU that is at any look at a value.
_AWAITING = re.compile(r"\.(wait|synchronize|item|tolist|cpu|numpy)\(")
# A wait in C++ that nothing else records, for a send or receive that was begun.
_UNRECORDED = re.compile(r"\.(wait|synchronize)\(")
_MAKES_STORE = re.compile(r"\bTCPStore\(")


@dataclass(frozen=True)
class Place:
    """Where one rank is: in which way, at which of the user's own lines, in which collective if it waits in one.

    `pairwise`: it waits for a send, a receive or a key, so that not everybody need come.
    """

    rank: Rank
    kind: Kind
    line: Frame | None = None
    collective: Collective | None = None
    pairwise: bool = False

    @property
    def at_disk(self) -> bool:
        """Whether it waits for a disk or a network file system, by the system's own word."""
        return self.kind == "idle" and self.rank.look is not None and self.rank.look.state == "disk-sleep"


def place_of(rank: Rank, at_ns: int | None = None) -> Place:
    """Where a rank is; for one that failed, where it was then; with `at_ns`, where it was at that moment."""
    if at_ns and any(call.at_ns > at_ns for call in rank.collectives):
        return Place(rank, "late")
    waits_in = next((call for call in rank.collectives if not call.done), None)
    if rank.exitcode == 0:
        return Place(rank, "left", rank.left_at, waits_in)
    if rank.failure is not None:
        return _where_it_failed(rank, waits_in)
    if rank.look is None:
        return Place(rank, "unknown")
    if rank.look.state == "stopped":
        return Place(rank, "stopped", rank.at, waits_in)
    return _where_it_is(rank, waits_in)


def _where_it_failed(rank: Rank, waits_in: Collective | None) -> Place:
    failure = rank.failure
    assert failure is not None
    kind: Kind = "waiting" if rank.came_up else "joining"
    if is_pairwise(failure.frames) or (waits_in is None and rank.made.requested):
        return Place(rank, kind, failure.where, None, pairwise=True)
    return Place(rank, kind, failure.where, waits_in or rank.given_up)


def _where_it_is(rank: Rank, waits_in: Collective | None) -> Place:
    """Where a living rank is, by its stack: a collective that runs beside it holds nobody up."""
    frames, line = rank.stack_frames, rank.at
    if rank.joining and is_joining(frames, once_more=rank.came_up):
        return Place(rank, "joining", line or rank.joining.where)
    inner = list(itertools.takewhile(lambda frame: not frame.own, frames))
    if is_in_loader(inner):
        return Place(rank, "loading", line, waits_in)
    if rank.awaited or is_pairwise(inner):
        return Place(rank, "waiting", line, None, pairwise=True)
    if calls_torch_distributed(inner) or _waits_unseen(rank, inner, waits_in):
        return Place(rank, "waiting", line, waits_in, pairwise=waits_in is None and not inner)
    if not frames:
        return Place(rank, "unknown")
    assert rank.look is not None
    # A GPU that computes while no collective is open computes for this rank; an open one keeps it busy by waiting.
    on_gpu = 0.0 if waits_in else rank.look.gpu_busy or 0.0
    return Place(rank, "busy" if max(rank.look.busy, on_gpu) >= BUSY_FROM else "idle", line, waits_in)


def unmoved_s(rank: Rank) -> float:
    """Seconds for which a rank had not moved when it was looked at, whatever a thread of it may print."""
    if rank.look is None:
        return 0.0
    waits_in = place_of(rank).collective
    waited_s = (rank.look.at_ns - waits_in.at_ns) / 1e9 if waits_in and not waits_in.done else 0.0
    return max(rank.look.silent_s, waited_s)


def peers(place: Place) -> tuple[int, ...]:
    """The ranks that a wait for a send or receive may be for; () where that is not known."""
    return place.rank.made.requested


def makes_a_store(place: Place) -> bool:
    """Whether a rank is at the line where it makes a store, which waits in C++ for the others."""
    return place.line is not None and bool(_MAKES_STORE.search(place.line.source))


def _waits_unseen(rank: Rank, inner: Sequence[Frame], waits_in: Collective | None) -> bool:
    """Whether a rank waits whose innermost call is none of torch.distributed's: in backward, at a look at a value.

    Backward may also compute. Where the collectives are known, one must be open; where not, the rank must be idle. A
    `wait` of Python's own, for a process or a thread, has frames below the user's line; torch's has none.
    """
    in_backward = is_in(inner, BACKWARD)
    source = rank.at.source if rank.at and not inner else ""
    if waits_in is None:
        idle = rank.look is not None and rank.look.busy < BUSY_FROM
        return idle and ((in_backward and not rank.collectives) or bool(_UNRECORDED.search(source)))
    return rank.at is None or in_backward or bool(_AWAITING.search(source))


def awaits(place: Place) -> bool:
    """Whether the line of a rank waits for what was begun at an earlier one."""
    return place.line is not None and bool(_AWAITING.search(place.line.source))
