"""Where each rank is: in which collective it waits, or what it does instead of waiting."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
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

# With more ranks than cores, each gets part of a core; a rank that sleeps or polls uses almost nothing.
BUSY_FROM = 0.15
# A call that ended sooner may have been asynchronous, as with async_op=True.
WAITS_FROM_S = 1.0
# A rank that has waited for less than this is in the middle of a normal step.
STILL_FROM_S = 2.0

# Where a program waits for a collective that it started earlier; on a GPU, wherever it reads a value.
_AWAITING = re.compile(r"\.(wait|synchronize|item|tolist|cpu|numpy)\(")
# A wait in C++ that nothing else records, for a send or receive that was started.
_UNRECORDED = re.compile(r"\.(wait|synchronize)\(")
_MAKES_STORE = re.compile(r"\bTCPStore\(")


@dataclass(frozen=True)
class Place:
    """Where one rank is: the kind of place, the user's own line, and the collective if it waits in one.

    `pairwise`: it waits for a send, a receive or a key, which does not need every rank.
    """

    rank: Rank
    kind: Kind
    line: Frame | None = None
    collective: Collective | None = None
    pairwise: bool = False

    @property
    def at_disk(self) -> bool:
        """Whether the operating system says that it waits for a disk or a network file system."""
        return self.kind == "idle" and self.rank.look is not None and self.rank.look.state == "disk-sleep"


def place_of(rank: Rank, at_ns: int | None = None) -> Place:
    """Where a rank is; if it failed, where it failed; with `at_ns`, where it was at that moment."""
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


def place_on_the_way_out(rank: Rank) -> Place | None:
    """Where a rank was that had failed and not ended: None if no look saw it, or only just after its failure."""
    failure, look = rank.failure, rank.look
    if failure is None or look is None or look.at_ns - failure.at_ns < STILL_FROM_S * 1e9:
        return None
    return place_of(replace(rank, failure=None, exitcode=None))


def _where_it_failed(rank: Rank, waits_in: Collective | None) -> Place:
    failure = rank.failure
    assert failure is not None
    kind: Kind = "waiting" if rank.came_up else "joining"
    if is_pairwise(failure.frames) or (waits_in is None and rank.made.requested):
        return Place(rank, kind, failure.where, None, pairwise=True)
    return Place(rank, kind, failure.where, waits_in or rank.given_up)


def _where_it_is(rank: Rank, waits_in: Collective | None) -> Place:
    """Where a living rank is, by its stack: a collective that runs in the background does not block it."""
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
    # A GPU that is busy while no collective is open computes for this rank; an open collective keeps it busy by waiting.
    on_gpu = 0.0 if waits_in else rank.look.gpu_busy or 0.0
    return Place(rank, "busy" if max(rank.look.busy, on_gpu) >= BUSY_FROM else "idle", line, waits_in)


def unmoved_s(rank: Rank) -> float:
    """Seconds for which a rank had made no progress when it was looked at, even if one of its threads prints."""
    if rank.look is None:
        return 0.0
    waits_in = place_of(rank).collective
    waited_s = (rank.look.at_ns - waits_in.at_ns) / 1e9 if waits_in and not waits_in.done else 0.0
    return max(rank.look.silent_s, waited_s)


def peers(place: Place) -> tuple[int, ...]:
    """The ranks that a send or receive may wait for; () where that is not known."""
    return place.rank.made.requested


def makes_a_store(place: Place) -> bool:
    """Whether a rank is at the line that makes a TCPStore, which waits in C++ for the others."""
    return place.line is not None and bool(_MAKES_STORE.search(place.line.source))


def _waits_unseen(rank: Rank, inner: Sequence[Frame], waits_in: Collective | None) -> bool:
    """Whether a rank waits although its innermost call is not torch.distributed's: in backward, or reading a value.

    Backward may also compute. If the collectives are known, one must be open; if not, the rank must be idle. Python's
    own `wait`, for a process or a thread, has frames below the user's line; torch's has none.
    """
    in_backward = is_in(inner, BACKWARD)
    source = rank.at.source if rank.at and not inner else ""
    if waits_in is None:
        idle = rank.look is not None and rank.look.busy < BUSY_FROM
        return idle and ((in_backward and not rank.collectives) or bool(_UNRECORDED.search(source)))
    return rank.at is None or in_backward or bool(_AWAITING.search(source))


def awaits(place: Place) -> bool:
    """Whether a rank's line waits for something that an earlier line started."""
    return place.line is not None and bool(_AWAITING.search(place.line.source))
