"""Says who came to a collective when the others had given it up, was on its way there by then, or left it too soon."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddpkit.runfolder.calls import Collective
from ddpkit.runfolder.frames import Frame
from ddpkit.runfolder.ranks import Rank

from .endings import deed, failed_at
from .finding import Finding, ranks_said
from .standing import STILL_FROM_S, WAITS_FROM_S, Standing, standing, standings

_SLEEPS = re.compile(r"\bsleep\(")
_WAITED = re.compile(r"Timed out waiting (\d+)ms for (?:recv|send) operation")
_CLOSED_BY_A_TIMEOUT = "Application timeout caused pair closure"


def on_its_way(late: Standing, waiter: Standing) -> bool:
    """Whether this rank computed, slept or was at the disk, with no exception to deal with, and would have come to the call in
    which `waiter` waited: by their lines in the innermost function that both are in, it was before that call, or still in an
    earlier turn of a loop of which each turn comes to it."""
    look, call, place = late.rank.look, waiter.collective, late.place
    sleeps = late.kind == "idle" and place is not None and bool(_SLEEPS.search(place.source))
    if look is None or look.polls or not (late.kind == "busy" or late.at_disk or sleeps):
        return False
    if call is None or call.only_if or late.rank.handling:
        return False
    for here, there in zip(_own_frames(late.rank), _own_frames(waiter.rank), strict=False):
        if (here.file, here.name) != (there.file, there.name):
            return False
        if here.line != there.line:
            return here.line < there.line or not {*call.every_turn}.isdisjoint(look.loops)
    return True


def _own_frames(rank: Rank) -> list[Frame]:
    """The user's own lines that it is in, or failed in, the outermost first."""
    frames = rank.failure.frames if rank.failure else reversed(rank.stack_frames)
    return [frame for frame in frames if frame.own]


def came_after_all_had_given_up(victim: Rank, ranks: Sequence[Rank]) -> Finding | None:
    """The victim itself, where each of the others had come to the collective in which it lost them long before it, and waits
    there no more: who catches its timeout may save and report first, or leave with exit code 0."""
    last = standing(victim).collective
    others = [r for r in ranks if r is not victim and (last is None or not last.ranks or r.rank in last.ranks)]
    joined = {r.rank: c for r in others for c in r.collectives if last and c.key == last.key and c.done}
    if last is None or last.is_exchange or last.root is not None or len(joined) < max(len(others), 1):
        return None
    late_s = (last.at_ns - max(call.at_ns for call in joined.values())) / 1e9
    if late_s < STILL_FROM_S or not all(_had_gone_on(r, joined[r.rank], victim) for r in others):
        return None
    came = f"Rank {victim.rank} came to {last.name}{last.from_line} {late_s:.0f} s after the others"
    return Finding((victim.rank,), f"{came}, who had given up waiting by then.", "straggler")


def _had_gone_on(rank: Rank, joined: Collective, victim: Rank) -> bool:
    """Whether this rank, which had `joined` before, waited no more when the victim lost it: it did something else, or had left
    before the victim came, and not at once, or was on its way out."""
    ended_ns = rank.ended_ns or 0
    if ended_ns <= failed_at(victim):
        return rank.exitcode == 0 and (ended_ns - joined.at_ns) / 1e9 >= STILL_FROM_S
    # To leave takes a moment, on a loaded machine seconds.
    waited_s = (joined.over_ns - joined.at_ns) / 1e9 if joined.over_ns < failed_at(victim) else 0.0
    return standing(rank).kind in ("busy", "idle") or (rank.exitcode == 0 and waited_s >= WAITS_FROM_S)


def left_before_it_was_over(victim: Rank, ranks: Sequence[Rank]) -> Finding | None:
    """Who began the collective in which the victim lost a peer, waited for its end nowhere, and left soon with exit code 0: the
    others need it for that, and lose it."""
    last = standings(ranks)[victim.rank].collective
    begun = {r.rank: c for r in ranks for c in r.collectives if last and c.key == last.key and not c.done}
    left = [r for r in ranks if r.exitcode == 0 and r.rank in begun]
    soon = [r.rank for r in left if ((r.ended_ns or 0) - begun[r.rank].at_ns) / 1e9 < STILL_FROM_S]
    if last is None or not soon or len(soon) < len(left):
        return None
    own = begun[soon[0]]
    gone = f"{ranks_said(soon)} left early with exit code 0, before {own.name}{own.from_line} was over"
    where = f" ({victim.failure.line_text})" if victim.failure and victim.failure.line_text else ""
    return Finding(tuple(soon), f"{gone}; rank {victim.rank} lost it there{where}.", "left_early")


def left_the_others_waiting(ranks: Sequence[Rank]) -> Finding | None:
    """Of ranks that have all left by an exit code, who left first, without the collective to which all others, two or more, then
    came: these came out of it only as that had gone, and caught what it raised."""
    first, *others = sorted(ranks, key=failed_at)
    last = {r.rank: r.collectives[-1] for r in others if r.collectives}
    keys = {call.key for call in last.values()}
    left = all(r.failure and r.failure.type == "SystemExit" and not r.failure.chain for r in ranks)
    if not left or len(others) < 2 or len(last) < len(others) or len(keys) != 1 or not first.collectives:
        return None
    call = last[others[0].rank]
    if call.root is not None or first.rank not in call.ranks or any(c.key in keys for c in first.collectives):
        return None
    if any(c.over_ns < failed_at(first) for c in last.values()):
        return None
    without = f"without {call.name}{call.from_line}, to which the others came"
    return Finding((first.rank,), f"Rank {first.rank} {deed(first)}, {without}.", "own")


def had_given_up_before(victim: Rank, ranks: Sequence[Rank]) -> Finding | None:
    """Who came too late to a collective that the victim had given up before, and caught that: gloo has closed the connections
    of that group then, and whatever else is begun in it fails at once, as it says, or as who came late has lost them too."""
    last = standing(victim).collective
    if last is None or victim.failure is None:
        return None
    closed_by_a_timeout = _CLOSED_BY_A_TIMEOUT in victim.failure.message
    before = [c for c in victim.collectives if (c.group, c.setup) == (last.group, last.setup) and c.seq < last.seq]
    for given_up in reversed(before):
        joined = {r.rank: c.at_ns for r in ranks for c in r.collectives if c.key == given_up.key}
        waited_s = (given_up.over_ns - given_up.at_ns) / 1e9
        late = {
            n: (at_ns - given_up.at_ns) / 1e9
            for n, at_ns in joined.items()
            if closed_by_a_timeout or (waited_s >= WAITS_FROM_S and at_ns > given_up.over_ns)
        }
        if too_late := tuple(sorted(n for n, seconds in late.items() if seconds >= STILL_FROM_S)):
            came = f"came to {given_up.name}{given_up.from_line} {max(late.values()):.0f} s after the others"
            closed = "who had given up waiting by then; what they begin after that in this group fails at once"
            return Finding(too_late, f"{ranks_said(too_late)} {came}, {closed}.", "straggler")
    return None


def gave_up_at(rank: Rank) -> int:
    """When this rank gave up waiting; a program may catch that, write a report, and raise it long after."""
    waited, said = standing(rank).collective, _WAITED.search(rank.failure.message) if rank.failure else None
    if said and waited and waited is rank.collectives[-1]:
        return min(failed_at(rank), waited.at_ns + int(said[1]) * 1_000_000)
    return failed_at(rank)
