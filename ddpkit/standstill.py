"""Says who holds up a job in which nothing moves, from what was found when ddpkit looked: collectives, stacks, states.

The rank that a wait ends at is at fault: a rank that waits for a peer is held up, and so is one that waits for a rank
which itself waits. Where the ranks wait for each other in different collectives, the one that left the common way is.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .collectives import Collective, in_time, outvoted, parting, strayed
from .finding import Finding, against_most, ranks_said, undecided, verb
from .frames import stack_frames
from .joining import making_a_group, of_another_size, while_joining
from .mismatch import parted_at
from .records import Rank
from .standing import STORE, Standing, at_line, each, instead, is_in, same_line, standings

_NAMED = re.compile(r"(?:\[Rank (\d+)\]: )?Ranks? (\d[\d, ]*) failed to pass monitoredBarrier")
_WORKERS_OWN = "_worker_loop"
_MAKES_STORE = re.compile(r"\bTCPStore\(")


def find(ranks: Sequence[Rank], live: bool = False, at_ns: int | None = None) -> Finding | None:
    """Who holds the job up, or held it up when a wait was given up at `at_ns`; None where nobody was looked at.

    With `live` the job may still go on by itself.
    """
    at = standings(ranks, at_ns)
    if not any(rank.look or rank.failure for rank in ranks):
        return None
    stopped = [s for s in at.values() if s.kind == "stopped"]
    if stopped:
        return _blamed(stopped, at, "stopped_process")
    if missed := _named_by_a_barrier(ranks):
        named, group = missed
        return _missed_a_barrier(named, {n: at[n] for n in group})
    joining = [s for s in at.values() if s.kind == "joining"] or _at_a_store(at)
    # A few that join once more have left a group in which the others still are.
    if joining and not (len(joining) * 2 <= len(at) and any(_was_met(s.rank, at) for s in joining)):
        return while_joining(joining, {**at, **{s.rank.rank: s for s in joining}}, live)
    waiting = {n: s for n, s in at.items() if s.kind == "waiting"} or _that_poll(at)
    if not waiting:
        return _nobody_waits(at)
    at = {**at, **waiting}
    if parted := parting({rank.rank: rank.collectives for rank in ranks}):
        return parted_at(parted)
    if len(waiting) == len(at) and (roots := _roots(waiting)):
        return _other_root(roots, waiting)
    if misled := _towards_one_who_has_gone_on(waiting, at):
        return _to_another_root(misled, waiting)
    if len(waiting) == len(at) and (found := making_a_group(waiting)):
        return found
    return _among_waiting(waiting, at, live, at_ns)


def _was_met(rank: Rank, at: Mapping[int, Standing]) -> bool:
    """Whether this rank has been in a process group: by its own record, or by what others have come through with it."""
    came_through = (c for s in at.values() for c in s.rank.collectives if c.done)
    return bool(rank.collectives) or any(rank.rank in c.ranks for c in came_through)


def _at_a_store(at: Mapping[int, Standing]) -> list[Standing]:
    """The ranks that make a store, which waits in C++ for those that are to meet there."""
    return [
        replace(s, kind="joining")
        for s in at.values()
        if s.kind == "idle" and s.place and _MAKES_STORE.search(s.place.source)
    ]


def _that_poll(at: Mapping[int, Standing]) -> dict[int, Standing]:
    """The idle ranks with a collective open that others have not joined: they ask for its end from time to time."""
    polling = {n: replace(s, kind="waiting") for n, s in at.items() if s.kind == "idle" and s.collective}
    return {n: s for n, s in polling.items() if _missing_in(s, at, None)}


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
        return Finding(tuple(there), f"{waited}; each of the others {first.words}{at_line(first)}.", "mismatch")
    if len(there) > len(elsewhere):
        return Finding(tuple(elsewhere), f"{said}{at_line(first)}.", "mismatch")
    return undecided(f"{said}{at_line(first)}.", "mismatch")


def _among_waiting(
    waiting: Mapping[int, Standing], at: Mapping[int, Standing], live: bool, at_ns: int | None
) -> Finding:
    """Some ranks wait: whoever has not joined what they wait for, and does not wait itself, holds them up."""
    held_up = _held_up(waiting, at, at_ns)
    if not held_up:
        return _nobody_is_missing(waiting, at)
    ranks = sorted({number for missing in held_up.values() for number in missing})
    first = at[ranks[0]]
    came_to_their_end = all(at[n].kind == "left" and not at[n].rank.left_at for n in ranks)
    if len(ranks) > len(waiting) and came_to_their_end:
        return _waits_alone(waiting, ranks)
    # The wait in which nobody else is missing, rather than one that only follows from it.
    nearest = min(held_up, key=lambda n: (len(_missing_in(waiting[n], at, at_ns)), n))
    what = _whom_it_waits_for(waiting[nearest])
    if first.kind == "left" and all(_lost_a_store(s) for s in waiting.values()):
        lost = f"{ranks_said(sorted(waiting))} lost a store{at_line(waiting[nearest])}"
        return Finding(tuple(ranks), f"{lost}; {ranks_said(ranks).lower()} had left with exit code 0.", "left_early")
    joined = "has not joined" if live else "never joined"
    does = f"{instead(first, ranks)}{', which is over for the others' if _is_over_elsewhere(first, at) else ''}"
    kinds = {"left": "left_early", "loading": _of_a_loader(first), "late": "straggler"}
    kind = kinds.get(first.kind, "never_joined")
    if first.kind == "late":
        joined, does = "came too late to", "the others had given up by then"
    sentence = f"{ranks_said(ranks)} {joined} {what}; {does}. {_who_waits_there(waiting)}{_helper(first)}"
    return Finding(tuple(ranks), sentence, kind)


def _held_up(waiting: Mapping[int, Standing], at: Mapping[int, Standing], at_ns: int | None) -> dict[int, list[int]]:
    """By waiting rank, those that it waits for and that do not wait themselves; only ranks that are held up by such a one."""
    free = [n for n, s in at.items() if s.kind != "waiting" and (s.kind != "unknown" or s.rank.collectives)]
    free += [n for n, s in waiting.items() if _has_gone_on(s, waiting) or _is_over_elsewhere(s, at)]
    found = {n: [m for m in _missing_in(s, at, at_ns) if m in free] for n, s in waiting.items()}
    if any(found.values()):
        return {n: missing for n, missing in found.items() if missing}
    # Whom a wait for a send or receive is for, or who sets a key of the store, may not be written down: it can be told only
    # where nobody else is left.
    alone = len(waiting) == 1 or all(map(_is_at_a_key, waiting.values()))
    return dict.fromkeys(waiting, free) if len(free) == 1 and alone else {}


def _is_at_a_key(standing: Standing) -> bool:
    """Whether this rank waits for a key of the store, and for whoever is to set it."""
    return standing.place is not None and STORE.search(standing.place.source) is not None


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
    return bool(others) and all(any(c.key == waits_in.key and c.done for c in s.rank.collectives) for s in others)


def _lost_a_store(standing: Standing) -> bool:
    """Whether this rank failed because the process that held a store has ended."""
    failure = standing.rank.failure
    return standing.collective is None and failure is not None and failure.type.endswith("DistNetworkError")


def _roots(waiting: Mapping[int, Standing]) -> dict[int, int]:
    """The source or destination that each rank gave to the call at which they all wait; empty where they agree."""
    roots = {n: root for n, s in waiting.items() if (root := _root(s)) is not None}
    first = waiting[min(waiting)].place
    at_one_line = all(same_line(s.place, first) for s in waiting.values())
    # Of ranks that are further on, the next one may well have another root.
    in_one = len({s.collective.key for s in waiting.values() if s.collective}) <= 1
    return roots if at_one_line and in_one and len(set(roots.values())) > 1 else {}


def _root(standing: Standing) -> int | None:
    """The source or destination of the collective in which this rank waits; None where it has none, or was not seen."""
    look, joined = standing.rank.look, standing.collective
    if look is None or look.root is not None or look.group_root is None:
        return look.root if look else None
    members = joined.ranks if joined else ()
    return members[look.group_root] if look.group_root < len(members) else None


def _other_root(roots: Mapping[int, int], waiting: Mapping[int, Standing]) -> Finding:
    """Ranks that wait at one line in a collective from, or to, different ranks."""
    said = "; ".join(f"rank {n} with rank {root}" for n, root in sorted(roots.items()))
    where = at_line(waiting[min(waiting)])
    opening = f"The ranks call one collective with different ranks as its source or destination{where}: {said}."
    return against_most(roots, opening, "mismatch")


def _towards_one_who_has_gone_on(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> dict[int, int]:
    """The ranks that wait in a collective to, or from, a root that has come through it, and that root. To none comes a gather
    or reduce without every rank of the group; from one a broadcast or scatter may come late to some, unless another rank
    that waits in it has named another root."""
    found = {}
    for number, standing in waiting.items():
        joined, root = standing.collective, _root(standing)
        if joined is None or root is None or root not in at:
            continue
        named = {_root(s) for s in waiting.values() if s.collective and s.collective.key == joined.key} - {None}
        through = any(c.key == joined.key and c.done for c in at[root].rank.collectives)
        if through and (joined.op in ("gather", "reduce") or len(named) > 1):
            found[number] = root
    return found


def _to_another_root(roots: Mapping[int, int], waiting: Mapping[int, Standing]) -> Finding:
    """Ranks that have joined a collective with a root that it did not have for the others."""
    first = min(roots)
    joined, root = _whom_it_waits_for(waiting[first]), roots[first]
    said = f"{ranks_said(sorted(roots))} joined {joined} with rank {root} as its source or destination"
    gone_on = f"rank {root} has come through it without that, and so with another"
    return Finding(tuple(sorted(roots)), f"{said}; {gone_on}. {each(waiting)}", "mismatch")


def _nobody_is_missing(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> Finding:
    """Every rank waits, or for whom they wait is not known."""
    shared = {s.collective.name for s in waiting.values() if s.collective} if len(waiting) == len(at) else set()
    # Ranks that all gave another size may have meant it: groups of their own.
    if (asked_amiss := of_another_size(at)) and len(asked_amiss.ranks) < len(at):
        return asked_amiss
    if len(shared) == 1 and all(s.collective for s in waiting.values()):
        every = f"Every rank has joined {_whom_it_waits_for(waiting[min(waiting)])}, and it does not end"
        return Finding((), f"{every}: what holds it up cannot be told from this.", "stuck")
    if beside := _beside_the_others(waiting, at):
        first = waiting[beside[0]]
        rest = {n: s for n, s in waiting.items() if n not in beside}
        joined = _whom_it_waits_for(next(iter(rest.values())))
        sentence = f"{ranks_said(beside)} never joined {joined}; {instead(first, beside)}. {_who_waits_there(rest)}"
        return Finding(beside, sentence, "never_joined")
    if (setter := _only_one_to_set_a_key(waiting, at)) is not None:
        for_it = {n: s for n, s in waiting.items() if n != setter}
        wait = f"{ranks_said(sorted(for_it))} wait{at_line(next(iter(for_it.values())))} for a key of the store"
        does = f"rank {setter}, the only one left to set it, {waiting[setter].words}{at_line(waiting[setter])}"
        return Finding((setter,), f"{wait}; {does}.", "all_waiting")
    said = "; ".join(f"rank {n} {s.words}{at_line(s) if s.collective else ''}" for n, s in sorted(at.items()))
    known = all(s.collective or _peers(s) for s in waiting.values())
    who = (
        "All ranks wait" if len(waiting) == len(at) else ranks_said(sorted(waiting)) + verb(waiting, " waits", " wait")
    )
    each_other = len(waiting) == len(at) or (known and len(waiting) > 1)
    opening = f"{who} for each other" if each_other else f"{who}, for whom cannot be told"
    histories = {n: s.rank.calls for n, s in at.items()} if each_other and known else {}
    odd_ones = _in_another_group(waiting, at) or _odd_among_alike(histories, at)
    odd_ones = odd_ones or _without_an_exchange(waiting) or _with_one_more(waiting, at)
    if found := None if odd_ones else strayed(histories):
        odd, before, after = found
        way = f"from {before.name}{before.from_line} it came to {after.name}{after.from_line}, as nobody else ever did"
        return Finding((odd,), f"{opening}: {said}. Rank {odd} left the common way: {way}.", "mismatch")
    if odd_ones := odd_ones or _out_of_step(waiting, at):
        way = "after the same calls most ranks came to another one"
        return Finding(odd_ones, f"{opening}: {said}. {ranks_said(odd_ones)} left the common way: {way}.", "mismatch")
    return Finding((), f"{opening}: {said}. Who is at fault cannot be told from this.", "all_waiting")


def _beside_the_others(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> tuple[int, ...]:
    """The few that wait for something that is in no record, a key of the store say, while all others, who are more, wait in
    one collective for them."""
    few = [n for n, s in sorted(waiting.items()) if s.collective is None and (not s.pairwise or _is_at_a_key(s))]
    others = [s for n, s in waiting.items() if n not in few]
    alone = len(waiting) == len(at) and len(few) < len(others)
    return tuple(few) if alone and all(s.collective and _missing_in(s, at, None) == few for s in others) else ()


def _only_one_to_set_a_key(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> int | None:
    """The rank that waits in a collective while all others, who are more than one, wait for a key of the store."""
    not_at_it = [n for n, s in waiting.items() if s.collective or not _is_at_a_key(s)]
    return not_at_it[0] if len(not_at_it) == 1 and len(waiting) == len(at) > 2 else None


def _in_another_group(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> tuple[int, ...]:
    """The ranks that wait in another process group than most, where both are groups of all ranks."""
    joined = {n: s.collective for n, s in waiting.items() if s.collective and set(s.collective.ranks) == set(at)}
    if len(joined) < len(at):
        return ()
    group, most = Counter(c.group for c in joined.values()).most_common(1)[0]
    return tuple(n for n, c in sorted(joined.items()) if c.group != group) if 2 * most > len(at) else ()


def _odd_among_alike(histories: Mapping[int, Sequence[Collective]], at: Mapping[int, Standing]) -> tuple[int, ...]:
    """The ranks that made another call than most, after the same calls, and wait in it, where all ranks have groups of the
    same sizes: as in a mesh, in which each runs the same program."""
    alike = len({tuple(sorted(map(len, s.rank.groups))) for s in at.values()}) == 1
    odd = outvoted(histories) if alike and histories else {}
    return tuple(odd) if all(at[n].collective is collective for n, collective in odd.items()) else ()


def _without_an_exchange(waiting: Mapping[int, Standing]) -> tuple[int, ...]:
    """The rank with which another waits to exchange, if it went on to its collective without the send or receive that most
    of the others had made by then."""
    for number, waiter in waiting.items():
        others = {n: s.rank.calls for n, s in waiting.items() if n != number}
        peers = _peers(waiter) if waiter.pairwise else ()
        for peer, call in outvoted(others).items() if others else ():
            if peer in peers and call is waiting[peer].collective:
                return (peer,)
    return ()


def _with_one_more(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> tuple[int, ...]:
    """The rank that makes one more send or receive with a peer than most of the others have made with it, and for which that
    peer waits in their next collective."""
    for number, waiter in waiting.items():
        for peer in _peers(waiter) if waiter.pairwise else ():
            if peer not in waiting or _missing_in(waiting[peer], at, None) != [number]:
                continue
            odd = outvoted({n: s.rank.calls for n, s in waiting.items() if n != peer}, _partners)
            made = in_time(waiter.rank.calls)
            if list(odd) == [number] and odd[number] is made[-1] and _partners(made[-1]) in map(_partners, made[:-1]):
                return (number,)
    return ()


def _out_of_step(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> tuple[int, ...]:
    """The one rank that came to a send or receive while most came to a collective, or the other way round, where all had
    exchanged before and come to a collective after it, each with as many exchanges as the others: as in a ring, or in pairs."""
    histories = {n: s.rank.calls for n, s in waiting.items()}
    odd = outvoted(histories, lambda call: call.is_exchange or call.call) if len(waiting) == len(at) else {}
    if len(odd) != 1:
        return ()
    ((number, last),) = odd.items()
    *before, newest = in_time(histories[number])
    in_rounds = any(one.is_exchange and not then.is_exchange for one, then in itertools.pairwise(before))
    return (number,) if newest is last and in_rounds else ()


def _partners(call: Collective) -> tuple[object, ...]:
    """What a call does and with whom, from whatever line."""
    return (call.op, call.ranks)


def _waits_alone(waiting: Mapping[int, Standing], left: Sequence[int]) -> Finding:
    """Most ranks came to their end without the collective in which a few still wait: the few have one too many."""
    numbers = tuple(sorted(waiting))
    what = _whom_it_waits_for(waiting[numbers[0]])
    in_vain = any(s.rank.failure for s in waiting.values())
    waits = "waited in vain" if in_vain else verb(numbers, "waits", "wait")
    sentence = f"{ranks_said(numbers)} {waits} in {what}, which no other rank joined: the others left with exit code 0."
    return Finding(numbers, sentence, "left_early")


def _whom_it_waits_for(waiter: Standing) -> str:
    if waiter.collective:
        return f"{waiter.collective.name}{waiter.collective.from_line}"
    return f"what rank {waiter.rank.rank} waits for{at_line(waiter)}"


def _missing_in(waiter: Standing, at: Mapping[int, Standing], at_ns: int | None) -> list[int]:
    """The ranks that have not joined what `waiter` waits in."""
    wanted = waiter.collective
    if waiter.pairwise:
        return [peer for peer in _peers(waiter) if peer in at]
    if wanted is None:
        return [n for n, s in at.items() if s.kind != "waiting"]
    members = wanted.ranks or tuple(at)
    return [n for n in members if n in at and n != waiter.rank.rank and _last_joined(at[n], wanted, at_ns) < wanted.seq]


def _peers(waiter: Standing) -> tuple[int, ...]:
    """The ranks that a wait for a send or receive may be for."""
    look = waiter.rank.look
    return waiter.rank.requested if look is None or look.peer is None else (look.peer,)


def _last_joined(standing: Standing, wanted: Collective, at_ns: int | None) -> int:
    known = [c for c in standing.rank.collectives if not (at_ns and c.at_ns > at_ns)]
    joined = [c for c in known if (c.group, c.setup) == (wanted.group, wanted.setup)]
    return max((c.seq for c in joined), default=0)


def _nobody_waits(at: Mapping[int, Standing]) -> Finding:
    """No rank waits for another: a loader, a sleep, an endless loop, or honest work."""
    alive = {n: s for n, s in at.items() if s.kind in ("loading", "busy", "idle")}
    if not alive:
        return Finding((), "No rank answers, and what they do cannot be told.", "unknown")
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
    waiting = {n: s for n, s in at.items() if s.kind == "waiting"}
    others = f" {each(waiting)}" if waiting else ""
    return Finding(tuple(by_rank), f"{each(by_rank)}{others}{_helper(blamed[0])}", kind)


def _of_a_loader(waiting: Standing) -> str:
    """The kind of a wait for a loader's worker: it may have died, which torch notices only every 5 s."""
    return "loader_dead" if waiting.rank.look and waiting.rank.look.dead_workers else "loader_stuck"


def _helper(standing: Standing) -> str:
    """What the loader's worker does that this rank waits for, or what the thread died of that an idle rank may wait for."""
    look = standing.rank.look
    if standing.kind == "idle" and (died_of := _thread_died_of(standing.rank)):
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


def _thread_died_of(rank: Rank) -> str:
    """What Python last said on stderr of a thread that ended by an exception; "" if none did."""
    _, died, said = rank.stderr.rpartition("Exception in thread ")
    return died and next((line for line in said.splitlines()[2:] if line[:1].strip()), "")


def _who_waits_there(waiting: Mapping[int, Standing]) -> str:
    """`Rank 0 waits there.`, or who waits where, if not all wait in the same collective."""
    if len({s.collective.name if s.collective else "" for s in waiting.values()}) > 1:
        return each(waiting)
    who = ranks_said(sorted(waiting))
    if any(s.rank.failure for s in waiting.values()):
        return f"{who} waited there in vain."
    return f"{who} {verb(waiting, 'waits', 'wait')} there."
