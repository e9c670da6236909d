"""Says who holds up a job in which nothing moves, from what was found when ddpkit looked: collectives, stacks, states.

The rank that a wait ends at is at fault: a rank that waits for a peer is held up, and so is one that waits for a rank
which itself waits. Where the ranks wait for each other in different collectives, the one that left the common way is.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddpkit.runfolder.calls import Collective
from ddpkit.runfolder.frames import stack_frames
from ddpkit.runfolder.ranks import Rank

from .circle import nobody_is_missing, of_different_roots
from .endings import sent_by
from .finding import Finding, ranks_said, undecided, verb
from .joining import makes_a_store, making_a_group, met_an_old_address, nobody_has_the_store, while_joining
from .late import on_its_way
from .mismatch import parted_at
from .parting import parting
from .standing import (
    WAITS_FROM_S,
    Standing,
    at_line,
    each,
    instead,
    is_at_a_key,
    is_in,
    kind_of_wait,
    line_unsaid,
    missing_in,
    same_line,
    standings,
    thread_died_of,
    who_waits_there,
    whom_it_waits_for,
    with_line,
)

_NAMED = re.compile(r"(?:\[Rank (\d+)\]: )?Ranks? (\d[\d, ]*) failed to pass monitoredBarrier")
_WORKERS_OWN = "_worker_loop"


def find(ranks: Sequence[Rank], live: bool = False, at_ns: int | None = None) -> Finding | None:
    """Who holds the job up, or held it up when a wait was given up at `at_ns`; None where nobody was looked at.

    With `live` the job may still go on by itself.
    """
    found = _find(ranks, live, at_ns)
    handling = {r.rank: r.handling for r in ranks if r.handling and found and r.rank in found.ranks}
    if not found or not handling:
        return found
    number, handled = next(iter(handling.items()))
    return replace(found, sentence=f"{found.sentence} Rank {number} is handling {handled}.")


def _find(ranks: Sequence[Rank], live: bool, at_ns: int | None) -> Finding | None:
    at = standings(ranks, at_ns)
    if not any(rank.look or rank.failure for rank in ranks):
        return None
    stopped = [s for s in at.values() if s.kind == "stopped"]
    if stopped:
        return _stopped(stopped, at)
    if missed := _named_by_a_barrier(ranks):
        named, group = missed
        return _missed_a_barrier(named, {n: at[n] for n in group})
    if found := nobody_has_the_store(at):
        return found
    joining = [s for s in at.values() if s.kind == "joining"] or _at_a_store(at)
    # A few that join once more have left a group in which the others still are.
    once_more = len(joining) * 2 <= len(at) and any(_was_met(s.rank, at) for s in joining)
    if joining and (not once_more or any(met_an_old_address(s.rank) for s in joining)):
        return while_joining(joining, {**at, **{s.rank.rank: s for s in joining}}, live)
    waiting = {n: s for n, s in at.items() if s.kind == "waiting"} or _that_poll(at)
    if not waiting:
        return _nobody_waits(at)
    at = {**at, **waiting}
    if found := _given_up_before(waiting, at):
        return found
    if parted := parting({rank.rank: rank.collectives for rank in ranks}):
        return parted_at(parted)
    if found := of_different_roots(waiting, at):
        return found
    if len(waiting) == len(at) and (found := making_a_group(waiting)):
        return found
    return _among_waiting(waiting, at, live, at_ns)


def _was_met(rank: Rank, at: Mapping[int, Standing]) -> bool:
    """Whether this rank has been in a process group: by its own record, or by what others have come through with it."""
    came_through = (c for s in at.values() for c in s.rank.collectives if c.done)
    return bool(rank.collectives) or any(rank.rank in c.ranks for c in came_through)


def _at_a_store(at: Mapping[int, Standing]) -> list[Standing]:
    """The ranks that make a store."""
    return [replace(s, kind="joining") for s in at.values() if s.kind == "idle" and makes_a_store(s)]


def _that_poll(at: Mapping[int, Standing]) -> dict[int, Standing]:
    """The idle ranks with a collective open that others have not joined: they ask for its end from time to time."""
    polling = {n: replace(s, kind="waiting") for n, s in at.items() if s.kind == "idle" and s.collective}
    return {n: s for n, s in polling.items() if missing_in(s, at, None)}


def _named_by_a_barrier(ranks: Sequence[Rank]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The ranks that `monitored_barrier` itself says were missing, and all of its group: it counts ranks within that."""
    everyone = tuple(rank.rank for rank in ranks)
    for rank in ranks:
        found = _NAMED.search(rank.failure.message) if rank.failure else None
        if rank.failure is None or found is None:
            continue
        where = rank.failure.where
        groups = rank.groups if where and "group=" in where.source else (everyone,)
        fitting = {g for g in groups if found[1] is None or (int(found[1]) < len(g) and g[int(found[1])] == rank.rank)}
        if len(fitting) > 1:
            # The default group would have been called without being named.
            fitting -= {everyone}
        numbers = [int(n) for n in found[2].replace(",", " ").split()]
        if len(fitting) == 1 and max(numbers) < len(group := fitting.pop()) and set(group) <= set(everyone):
            return tuple(sorted(group[n] for n in numbers)), group
    return None


def _missed_a_barrier(named: tuple[int, ...], at: Mapping[int, Standing]) -> Finding:
    """Ranks that never came to a monitored barrier; ones that wait elsewhere may be right, and the barrier one too many."""
    there = [n for n, s in at.items() if is_in(s, "monitored_barrier")]
    elsewhere = [n for n in at if n not in there]
    first = at[named[0]]
    barrier = f"the monitored barrier{at_line(at[there[0]])}" if there else "a monitored barrier"
    does = "" if first.kind == "unknown" else f"; {instead(first, named)}"
    said = f"{ranks_said(named)} never came to {barrier}{does}"
    if not any(at[number].kind == "waiting" for number in named):
        return Finding(named, f"{said}.", "never_joined")
    together = len({(at[n].words, at[n].place) for n in elsewhere}) == 1
    if there and together and len(elsewhere) > len(there):
        waited = f"{ranks_said(there)} waited in {barrier} to which nobody else came"
        return Finding(tuple(there), f"{waited}; each of the others {with_line(first)}.", "mismatch")
    if len(there) > len(elsewhere):
        return Finding(tuple(elsewhere), f"{said}{line_unsaid(first)}.", "never_joined")
    return undecided(f"{said}{line_unsaid(first)}.", "mismatch")


def _given_up_before(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> Finding | None:
    """Who never came to a collective that another rank gave up, and caught that, but waits with most ranks in one of another
    group: where those now part from the one that gave up, it only follows from that."""
    given_up = [(c.at_ns, n, c) for n, s in at.items() for c in s.rank.collectives if _waited_long(c)]
    for _, number, call in sorted(given_up, key=lambda each: each[0]):
        missing = missing_in(replace(at[number], collective=call, pairwise=False), at, None)
        waits_in = waiting[missing[0]].collective if missing and missing[0] in waiting else None
        if waits_in is None or waits_in.group == call.group:
            continue
        together = {n for n, s in waiting.items() if s.collective and _is_alike(s.collective, waits_in)}
        if together <= {*call.ranks} or number in missing_in(at[missing[0]], at, None):
            # They wait for the one that gave up as well, and may have gone on as they should.
            continue
        # Of a long training only the last collectives are kept.
        recorded = all(at[n].rank.collectives[0].at_ns <= call.at_ns for n in missing if n in together)
        if {*missing} <= together and number not in together and 2 * len(together) > len(at) and recorded:
            never = f"{ranks_said(missing)} never joined {call.name}{call.from_line}"
            then = "" if at[number].collective is call else f", and {at[number].words}"
            gave_up = f"Rank {number} gave it up after {(call.over_ns - call.at_ns) / 1e9:.0f} s{then}"
            return Finding(tuple(missing), f"{never}; {instead(at[missing[0]], missing)}. {gave_up}.", "never_joined")
    return None


def _waited_long(call: Collective) -> bool:
    """Whether this is a call that no rank comes through without the others, and took so long that it may have been given up."""
    needs_all = call.op == "barrier" or call.op.startswith(("all_reduce", "all_gather", "reduce_scatter"))
    return needs_all and call.done and call.over_ns - call.at_ns >= WAITS_FROM_S * 1e9


def _is_alike(one: Collective, other: Collective) -> bool:
    return one.key == other.key and one.matches(other)


def _among_waiting(
    waiting: Mapping[int, Standing], at: Mapping[int, Standing], live: bool, at_ns: int | None
) -> Finding:
    """Some ranks wait: whoever has not joined what they wait for, and does not wait itself, holds them up."""
    held_up = _held_up(waiting, at, at_ns)
    if not held_up:
        return nobody_is_missing(waiting, at)
    ranks = sorted({number for missing in held_up.values() for number in missing})
    if found := _keeps_a_lock(ranks, at, "never_joined") or _went_on_without_the_most(ranks, waiting, at):
        return found
    first = at[ranks[0]]
    came_to_their_end = all(at[n].kind == "left" and not at[n].rank.left_at for n in ranks)
    if len(ranks) > len(waiting) and came_to_their_end:
        return _waits_alone(waiting, ranks)
    # The wait in which nobody else is missing, rather than one that only follows from it.
    nearest = min(held_up, key=lambda n: (len(missing_in(waiting[n], at, at_ns)), n))
    what = whom_it_waits_for(waiting[nearest])
    if first.kind == "left" and all(_lost_a_store(s) for s in waiting.values()):
        lost = f"{ranks_said(sorted(waiting))} lost a store{at_line(waiting[nearest])}"
        return Finding(tuple(ranks), f"{lost}; {ranks_said(ranks).lower()} had left with exit code 0.", "left_early")
    joined = "has not joined" if live else "never joined"
    does = f"{instead(first, ranks)}{', which is over for the others' if _is_over_elsewhere(first, at) else ''}"
    kinds = {"left": "left_early", "loading": _of_a_loader(first), "late": "straggler"}
    kind = kinds.get(first.kind) or kind_of_wait(waiting[nearest])
    if first.kind == "late":
        joined, does = "came too late to", "the others had given up by then"
    elif at_ns and all(on_its_way(at[n], waiting[nearest]) for n in ranks):
        kind, joined, what = "straggler", "had not come to", f"{what} when the others gave up"
    sentence = f"{ranks_said(ranks)} {joined} {what}; {does}. {who_waits_there(waiting)}{_helper(first)}"
    return Finding(tuple(ranks), sentence, kind)


def _keeps_a_lock(missing: Sequence[int], at: Mapping[int, Standing], kind: str) -> Finding | None:
    """The one rank that holds the lock on a file for which all others wait that are missing elsewhere."""
    found = ((n, look.locked_by) for n in missing if (look := at[n].rank.look))
    locked_by = {n: holder for n, holder in found if holder is not None and holder in at}
    at_fault = {*missing, *locked_by.values()} - {*locked_by}
    if not locked_by or len(at_fault) != 1:
        return None
    (holder,) = at_fault
    held_up = sorted(n for n, by in locked_by.items() if by == holder)
    wait = f"{ranks_said(held_up)} {verb(held_up, 'waits', 'wait')} for the lock on a file{at_line(at[held_up[0]])}"
    return Finding((holder,), f"{wait}, which rank {holder} holds; it {with_line(at[holder])}.", kind)


def _went_on_without_the_most(
    missing: Sequence[int], waiting: Mapping[int, Standing], at: Mapping[int, Standing]
) -> Finding | None:
    """The few that wait in a collective, where most ranks look, at one line, for something that does not come."""
    first, few = at[missing[0]], tuple(sorted(waiting))
    looking = all((look := at[n].rank.look) and look.polls and same_line(at[n].place, first.place) for n in missing)
    if not looking or len(missing) <= len(few) or len(missing) + len(few) < len(at):
        return None
    wait = f"{ranks_said(missing)} wait{at_line(first)}, for something that does not come"
    went_on = f"{ranks_said(few).lower()} alone went on without it, and {waiting[few[0]].words}"
    return Finding(few, f"{wait}; {went_on}.", "never_joined")


def _held_up(waiting: Mapping[int, Standing], at: Mapping[int, Standing], at_ns: int | None) -> dict[int, list[int]]:
    """By waiting rank, those that it waits for and that do not wait themselves; only ranks that are held up by such a one."""
    free = [n for n, s in at.items() if s.kind != "waiting" and (s.kind != "unknown" or s.rank.collectives)]
    free += [n for n, s in waiting.items() if _has_gone_on(s, waiting) or _is_over_elsewhere(s, at)]
    found = {n: [m for m in missing_in(s, at, at_ns) if m in free] for n, s in waiting.items()}
    if any(found.values()):
        return {n: missing for n, missing in found.items() if missing}
    # Whom a wait for a send or receive is for, or who sets a key of the store, may not be written down: it can be told only
    # where nobody else is left.
    alone = len(waiting) == 1 or all(map(is_at_a_key, waiting.values()))
    return dict.fromkeys(waiting, free) if len(free) == 1 and alone else {}


def _has_gone_on(standing: Standing, waiting: Mapping[int, Standing]) -> bool:
    """Whether this rank waits in a group that was set up anew, while as many or more still are in the one before."""
    waits_in = [s.collective.setup for s in waiting.values() if s.collective]
    setup = standing.collective.setup if standing.collective else 0
    return setup > min(waits_in, default=0) and 2 * waits_in.count(setup) <= len(waits_in)


def _is_over_elsewhere(standing: Standing, at: Mapping[int, Standing]) -> bool:
    """Whether what this rank waits in is over for every other rank of the group: then none of them holds it up."""
    waits_in = standing.collective
    if waits_in is None or standing.kind != "waiting" or standing.pairwise:
        return False
    others = [s for n, s in at.items() if s is not standing and (not waits_in.ranks or n in waits_in.ranks)]
    return bool(others) and all(
        s.kind != "late" and any(c.key == waits_in.key and c.done for c in s.rank.collectives) for s in others
    )


def _lost_a_store(standing: Standing) -> bool:
    """Whether this rank failed because the process that held a store has ended."""
    failure = standing.rank.failure
    return standing.collective is None and failure is not None and failure.type.endswith("DistNetworkError")


def _waits_alone(waiting: Mapping[int, Standing], left: Sequence[int]) -> Finding:
    """Most ranks came to their end without the collective in which a few still wait: the few have one too many."""
    numbers = tuple(sorted(waiting))
    what = whom_it_waits_for(waiting[numbers[0]])
    in_vain = any(s.rank.failure for s in waiting.values())
    waits = "waited in vain" if in_vain else verb(numbers, "waits", "wait")
    sentence = f"{ranks_said(numbers)} {waits} in {what}, which no other rank joined: the others left with exit code 0."
    return Finding(numbers, sentence, "left_early")


def _nobody_waits(at: Mapping[int, Standing]) -> Finding:
    """No rank waits for another: a loader, a sleep, an endless loop, or honest work."""
    alive = {n: s for n, s in at.items() if s.kind in ("loading", "busy", "idle")}
    if not alive:
        return Finding((), "No rank answers, and what they do cannot be told.", "unknown")
    if found := _keeps_a_lock([*at], at, "silent"):
        return found
    held = [s for s in alive.values() if s.rank.look and s.rank.look.inside]
    if held and len(held) < len(at) and all(s in held or s.kind in ("left", "joining") for s in at.values()):
        return _blamed(held, at, "silent")
    loading = [s for s in alive.values() if s.kind == "loading"]
    others_left = all(s.kind == "left" for n, s in at.items() if n not in alive)
    kind = (
        _of_a_loader(loading[0]) if loading else "busy" if any(s.kind == "busy" for s in alive.values()) else "silent"
    )
    if len({s.words for s in alive.values()}) == 1 and (len(alive) == len(at) or (len(alive) == 1 and others_left)):
        first = alive[min(alive)]
        who = "Every rank" if len(alive) > 1 else f"Rank {first.rank.rank}"
        beside = "; the others have ended" if len(at) > len(alive) else ""
        return Finding(tuple(sorted(alive)), f"{who} {first.words}{beside}.{_helper(first)}", kind)
    if loading and len(loading) < len(at):
        return _blamed(loading, at, kind)
    said = "; ".join(f"rank {n} {s.words}" for n, s in sorted(alive.items()))
    return Finding((), f"No rank waits for another: {said}.", kind)


def _blamed(blamed: Sequence[Standing], at: Mapping[int, Standing], kind: str) -> Finding:
    by_rank = {s.rank.rank: s for s in blamed}
    waiting = {n: s for n, s in at.items() if s.kind in ("waiting", "joining") and n not in by_rank}
    others = f" {each(waiting)}" if waiting else ""
    return Finding(tuple(by_rank), f"{each(by_rank)}{others}{_helper(blamed[0])}", kind)


def _stopped(stopped: Sequence[Standing], at: Mapping[int, Standing]) -> Finding:
    """Ranks that are stopped, and those that have stopped them, where they are ranks of the job."""
    found = _blamed(stopped, at, "stopped_process")
    senders = {s.rank.rank: sent_by(s.rank, "SIGSTOP", [each.rank for each in at.values()]) for s in stopped}
    if not all(senders.values()):
        return found
    said = "; ".join(f"rank {by[0]} sent SIGSTOP to rank {number}{by[1]}" for number, by in senders.items() if by)
    both = {*senders, *(by[0] for by in senders.values() if by)}
    return replace(found, ranks=tuple(sorted(both)), sentence=f"R{said[1:]}. {found.sentence}")


def _of_a_loader(waiting: Standing) -> str:
    """The kind of a wait for a loader's worker: it may have died, which torch notices only every 5 s."""
    return "loader_dead" if waiting.rank.look and waiting.rank.look.dead_workers else "loader_stuck"


def _helper(standing: Standing) -> str:
    """What the loader's worker does that this rank waits for, or what the thread died of that an idle rank may wait for."""
    look = standing.rank.look
    if standing.kind == "idle" and (died_of := thread_died_of(standing.rank)):
        return f" A thread of it has died of {died_of}."
    if look is None or standing.kind != "loading":
        return ""
    if look.dead_workers:
        return " A worker of it has died."
    for _pid, stack in look.workers:
        # Further out stand the rank's own frames, from before the worker was forked.
        frames = itertools.takewhile(lambda frame: not frame.function.endswith(_WORKERS_OWN), stack_frames(stack, {}))
        if place := next((frame for frame in frames if frame.own), None):
            stopped = "stopped (SIGSTOP) " if look.stopped_workers else ""
            return f" The worker is {stopped}in {place.function}, {place.text}."
    return ""
