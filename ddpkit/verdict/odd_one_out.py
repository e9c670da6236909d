"""Which rank differs if the waits form a circle. Question 3 of docs/verdict.md; `habits.py` has two more rules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from itertools import zip_longest

from ddpkit.runfolder.calls import Collective, camps
from ddpkit.runfolder.failures import said_of_others
from ddpkit.runfolder.frames import is_in

from .finding import Finding
from .habits import by_habit, by_next_call
from .places import peers
from .waits import Scene, circle, kind_of_odd, minority, owners

# Each rule gets the ranks in the circle too, so that `odd_one` can ask all rules alike; not every rule uses them.
Rule = Callable[[Scene, set[int]], Finding | None]
# With a single message there is nothing to compare.
_ENOUGH_MESSAGES = 2


def odd_one(now: Scene, everyone: bool = False) -> Finding:
    """The rank that differs, by the first rule that names one."""
    inside = set(now.at) if everyone else circle(now) or set(now.at)
    for rule in RULES:
        found = rule(now, inside)
        if found is not None:
            return found
    return Finding((), "cannot be told", kind_of_odd(now, set()), now, now.split)


def by_groups(now: Scene, inside: set[int]) -> Finding | None:
    """The ranks whose `new_group` names other ranks than most; nobody, if each rank names a group with itself in it.

    A rank must be in `new_group`, or wait in that group.

    Example: ranks 0, 1 and 3 call new_group([0, 1, 2]), rank 2 calls new_group([0, 1]): rank 2.
    """
    for asked in zip_longest(*(place.rank.made.groups_asked for place in now.at.values())):
        named = dict(zip(now.at, asked, strict=True))
        if len(set(asked)) == 1:
            continue
        own, held_up, said = True, False, []
        for number, ranks in named.items():
            place = now.at[number]
            used = place.collective is not None and place.collective.ranks == ranks
            held_up = held_up or used or is_in(place.rank.frames, "_new_group_with_tag")
            own = own and ranks is not None and number in ranks
            said.append(f"rank {number} named {'no further group' if ranks is None else list(ranks) or 'all'}")
        odd = () if own else minority(named)
        kind = "never_joined" if odd and set(map(named.get, odd)) == {None} else "mismatch"
        if not held_up:
            return None
        return Finding(odd, "groups", kind, now, detail="; ".join(said)) if odd or None not in asked else None
    return None


def by_majority(now: Scene, inside: set[int]) -> Finding | None:
    """The ranks that joined another collective than most did under the same number.

    Example: ranks 0 and 1 join all_reduce #7, rank 2 joins barrier #7: rank 2. Two ranks have no majority.
    """
    most = camps(now.split)[-1] if now.split else []
    if 2 * len(most) <= len(now.split):
        return None
    return Finding(tuple(sorted(set(now.split) - set(most))), "majority", "mismatch", now, now.split)


def by_exception(now: Scene, inside: set[int]) -> Finding | None:
    """The only rank that handles an exception of its own, or whose thread died with one, while the others wait.

    Example: rank 1 raises ValueError and waits in the barrier of its `finally`; rank 0 waits in all_reduce: rank 1.
    """
    failed = {}
    for number, place in now.at.items():
        said = "" if said_of_others([place.rank.handling]) else place.rank.handling
        if said or place.rank.thread_died_of:
            failed[number] = said or f"{place.rank.thread_died_of}, in a thread"
    if len(failed) != 1:
        return None
    ((number, said),) = failed.items()
    kind = "own" if now.at[number].rank.failure else kind_of_odd(now, {number})
    return Finding((number,), "exception", kind, now, now.split, detail=said)


def by_key(now: Scene, inside: set[int]) -> Finding | None:
    """The only rank that must set the key for which others wait, and that waits itself.

    Example: rank 0 waits for "done/2"; rank 1, which set "done/0" and "done/1", waits in all_reduce #4: rank 1.
    """
    known, owed, waiter = set[int](), set[int](), -1
    for number, place in now.waiting.items():
        if place.rank.awaited:
            known |= owners(place, now)
            owed |= now.waits[number]
            waiter = number if now.waits[number] else waiter
    owed = known or owed
    return Finding(tuple(owed), "key", "no_key", now, others=(waiter,)) if len(owed) == 1 else None


def by_loop(now: Scene, inside: set[int]) -> Finding | None:
    """The rank that has left a loop while the others are still in it; nobody, if loops disagree.

    Example: rank 0 is in all_reduce #13 in a loop, rank 1 has left that loop and is in barrier #13: rank 1.
    """
    last = now.split or _calls_waited_in(now, inside)
    found = {}
    for call in last.values():
        for loop in now.loops(call)[:1]:
            still: list[int] = []
            out: list[int] = []
            for number in sorted(last):
                (still if loop in now.loops(last[number]) else out).append(number)
            if out and all(_has_left(number, loop, call, now, last) for number in out):
                found[tuple(out if len(out) <= len(still) else still)] = loop
    if len(found) != 1:
        return None
    ((odd, loop),) = found.items()
    return Finding(odd, "loop", kind_of_odd(now, set(odd)), now, last, detail=loop)


def _calls_waited_in(now: Scene, inside: set[int]) -> dict[int, Collective]:
    """The collectives in which ranks wait for each other; empty if one of them waits for a message."""
    found = {}
    for number in inside:
        place = now.at[number]
        if place.collective is None or place.pairwise:
            return {}
        found[number] = place.collective
    return found


def _has_left(number: int, loop: str, theirs: Collective, now: Scene, last: Mapping[int, Collective]) -> bool:
    """Whether a rank was in that loop and has left it, and is not just in the next turn of a loop around it."""
    if not any(loop in now.loops(call) for call in now.calls[number]):
        return False
    for outer in now.loops(last[number]):
        if outer in now.loops(theirs):
            return outer in now.program.every_turn(last[number].path)
    return True


def by_step(now: Scene, inside: set[int]) -> Finding | None:
    """The ranks that made a known call in an order that no rank had used, while the others kept their order.

    Example: after backward, all ranks have always called barrier; rank 1 goes from backward to backward: rank 1.
    """
    before = {number: _calls_before(call, number, now) for number, call in now.split.items()}
    odd = []
    for number, call in now.split.items():
        step = (before[number][-1] if before[number] else None, call.call)
        if not any(step in itertools.pairwise(calls) for calls in before.values()):
            odd.append(number)
    known = all(_is_known(now.split[number], now) for number in odd)
    if not known or not 0 < len(odd) < len(now.split):
        return None
    return Finding(tuple(odd), "step", "mismatch", now, now.split)


def _calls_before(call: Collective, number: int, now: Scene) -> list[object]:
    """The calls that a rank had made before that one in the same process group."""
    found: list[object] = []
    for earlier in now.calls[number]:
        if earlier.group == call.group and earlier.seq < call.seq:
            found.append(earlier.call)
    return found


def _is_known(call: Collective, now: Scene) -> bool:
    """Whether some rank had made that call before the split."""
    return any(call.call in _calls_before(own, number, now) for number, own in now.split.items())


def by_debt(now: Scene, inside: set[int]) -> Finding | None:
    """The rank that sent the waiting rank one message fewer than it sent to others, or than others sent.

    Example: rank 2 waits to receive from rank 1, which sent 2 messages to rank 2 and 3 to rank 0: rank 1.
    """
    owes = set()
    for number, place in now.waiting.items():
        receives = place.pairwise and now.calls[number] and "recv" in now.calls[number][-1].op
        for peer in peers(place) if receives else ():
            if peer in now.at and _is_one_short(number, peer, now):
                owes.add(peer)
    return Finding(tuple(owes), "debt", "unmatched", now) if len(owes) == 1 else None


def _is_one_short(number: int, peer: int, now: Scene) -> bool:
    got = len(now.at[peer].rank.exchanged_with(number, "send"))
    sent, came = set(), set()
    others = set(now.at) - {number, peer}
    for other in others:
        sent.add(len(now.at[peer].rank.exchanged_with(other, "send")))
        came.add(len(now.at[number].rank.exchanged_with(other, "recv")))
    return (got >= _ENOUGH_MESSAGES or len(others) >= 2) and {got + 1} in (sent, came)


def by_if(now: Scene, inside: set[int]) -> Finding | None:
    """The ranks that made a call no rank had made before, because of an `if` about the rank.

    Example: `if me == 0: dist.barrier()`; rank 0 is in barrier #8, rank 1 in all_reduce #8: rank 0.
    """
    led = {}
    for number, call in sorted(now.split.items()):
        test = "" if _is_known(call, now) else now.program.if_about_rank(call.path)
        if test:
            led[number] = test
    if not 0 < len(led) < len(now.split):
        return None
    return Finding(tuple(led), "if", "mismatch", now, now.split, detail=next(iter(led.values())))


# The first rule that names a rank decides. `by_exception` and `by_key` belong to questions 1 and 2: they compare no ranks.
RULES: tuple[Rule, ...] = (
    *(by_groups, by_majority, by_exception, by_key, by_loop, by_step, by_next_call, by_habit, by_debt, by_if),
)
