"""Says where the ranks of a job part ways, and which of them are the odd ones, from the collectives that each has joined."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ddpkit.runfolder.calls import Collective, in_time

from .meshes import HABIT_FROM, Histories, across_the_groups


@dataclass(frozen=True)
class Parting:
    """The first collective that the ranks of a group joined as different ones: rank to what it joined, and which ranks are
    the odd ones, empty where the evidence does not say. `why` says what makes them odd. Where some had come to the end of a
    loop in which the others still are, `loop` is its `file:line`."""

    joined: Mapping[int, Collective]
    odd: tuple[int, ...] = ()
    why: str = ""
    loop: str = ""


def parting(histories: Histories) -> Parting | None:
    """Where the ranks first part, and whether that is the end of a loop, which some come to before the others."""
    parted = _parting(histories)
    if parted is None:
        return None
    if not parted.odd:
        return _across_the_groups(parted, histories)
    rest = tuple(sorted(set(parted.joined) - set(parted.odd)))
    for done, inside in ((parted.odd, rest), (rest, parted.odd)):
        if loop := _loop_left(done, inside, parted.joined, histories):
            return replace(parted, loop=loop)
    return parted


def _across_the_groups(parted: Parting, histories: Histories) -> Parting:
    """Where `parted` does not say who is odd: whether one of the ranks there has taken a group across those of the others."""
    found = across_the_groups(histories)
    if found is None or not {*found[0]} <= {*parted.joined}:
        return parted
    odd, why = found
    return replace(parted, odd=odd, why=why)


def _loop_left(
    done: Sequence[int], inside: Sequence[int], joined: Mapping[int, Collective], histories: Histories
) -> str:
    """The innermost loop that these ranks have come to the end of, and in which the others still are; "" where they may have left
    it otherwise, as by an exception, are in it still, with a thread beside it, may have passed it by this time, or have had as
    many turns, as where the others are behind by another call, or have come to it once more, by another loop around it."""
    left = {each for n in inside for each in joined[n].loops} - {each for n in done for each in joined[n].loops}
    elsewhere = any(joined[n].raising for n in done) or len({c.in_thread for c in joined.values()}) > 1
    if elsewhere or not all(left <= {*joined[n].to_the_end} for n in inside):
        return ""
    turn = joined[inside[0]]
    loop = next(iter(turn.loops), "")
    before = ([c for c in in_time(histories[n]) if c.at_ns < now.at_ns][-1:] for n, now in joined.items())
    from_there = all(turn.loops == call.loops[-len(turn.loops) :] for calls in before for call in calls)
    # Of a long training only the last collectives are kept, not from the same one on for all.
    since = max(next(c.seq for c in histories[n] if (c.group, c.setup) == (turn.group, turn.setup)) for n in joined)
    turns = {
        n: sum((c.call, c.path) == (turn.call, turn.path) and c.seq >= since for c in histories[n]) for n in joined
    }
    fewer = max(turns[n] for n in done) < min(turns[n] for n in inside)
    return loop if from_there and fewer and _have_left_the_loop(done, joined, histories) else ""


def _parting(histories: Histories) -> Parting | None:
    """Where the ranks first part: they joined another operation, size or type, or one left the common way unnoticed.

    Unnoticed is where operation and size agree and the lines of the program do not. A program may let ranks join from
    different lines on purpose. So only a rank counts that did what nobody had done at this point before, while others did
    as always.
    """
    for joined in _by_number(histories):
        if parted := unlike(joined):
            if parted.odd:
                return parted
            judged = _judged_by_habit(joined, histories)
            return judged if judged.odd else _judged_by_others(joined, histories)
        placed = all(collective.where for collective in joined.values())
        if placed and len({collective.call for collective in joined.values()}) > 1:
            strayed = _judged_by_habit(joined, histories)
            if strayed.odd:
                return strayed
    return None


def unlike(joined: Mapping[int, Collective]) -> Parting | None:
    """Whether the ranks joined other operations, sizes or types as the same collective: the odd ones are those who did not join
    it as most did, if most agree. None where all agree."""
    *fewer, most = _camps(joined)
    if not fewer:
        return None
    if 2 * len(most) <= len(joined):
        return Parting(joined)
    return Parting(joined, tuple(sorted(rank for camp in fewer for rank in camp)), "the other ranks agree")


def _by_number(histories: Histories) -> list[dict[int, Collective]]:
    """What each rank joined as the same collective, in order; only where more than one did."""
    found: dict[tuple[int, str, int], dict[int, Collective]] = {}
    for rank, history in histories.items():
        for collective in history:
            found.setdefault(collective.key, {})[rank] = collective
    in_order = sorted(found.values(), key=lambda joined: min(c.at_ns for c in joined.values()))
    return [joined for joined in in_order if len(joined) > 1]


def _camps(joined: Mapping[int, Collective]) -> list[list[int]]:
    """Ranks that agree with each other, the fewest first."""
    camps: list[list[int]] = []
    for rank, collective in joined.items():
        camp = next((c for c in camps if joined[c[0]].matches(collective)), None)
        if camp is None:
            camps.append([rank])
        else:
            camp.append(rank)
    return sorted(camps, key=len)


def _judged_by_habit(joined: Mapping[int, Collective], histories: Histories) -> Parting:
    """The odd ones are those who did what no rank had done at this point before, if others did as always.

    A call that nobody had ever made may be one too many, or one that the others forgot. It counts as odd where the program
    makes it for some ranks only, and after a loop in which the others still are.
    """
    usual = {rank for rank, collective in joined.items() if _is_usual(collective, joined, histories)}
    odd = set(joined) - usual
    known = {c.call for rank in joined for c in histories[rank] if c.seq < joined[rank].seq}
    unheard_of = {rank for rank in odd if joined[rank].call not in known}
    if unheard_of:
        for_some = {rank for rank, collective in joined.items() if collective.only_if}
        if for_some and for_some <= unheard_of and len(for_some) < len(joined):
            test = joined[min(for_some)].only_if
            return Parting(joined, tuple(sorted(for_some)), f"not every rank comes there, by `{test}`")
        if not for_some and _have_left_the_loop(unheard_of, joined, histories):
            return Parting(joined, tuple(sorted(unheard_of)), "the loop that is left there goes on elsewhere")
        return Parting(joined)
    if usual and odd:
        return Parting(joined, tuple(sorted(odd)), "in earlier steps every rank did otherwise")
    return Parting(joined)


def strayed(
    histories: Histories, alike: Callable[[Collective], object] = lambda call: call.call
) -> tuple[int, Collective, Collective] | None:
    """The only rank that once went from one call to another as nobody else did in the whole job, nor itself at other times,
    across groups: the rank, the call before and the one it came to. None where no rank, or more than one, did so. Calls are the
    same where `alike` is.

    Who sends comes to the first send alone. With sends and receives only a rank's last step counts, and if that of every
    other rank was one that it had made before. A first send from a line may be what its peer has not come to receive.
    """
    steps = [(rank, *pair) for rank, history in histories.items() for pair in itertools.pairwise(in_time(history))]
    made = Counter((alike(before), alike(after)) for _rank, before, after in steps)
    left = Counter(alike(before) for _rank, before, _after in steps)
    left_by = Counter((rank, alike(before)) for rank, before, _after in steps)
    habits = {(rank, call) for (rank, call), times in left_by.items() if times > 1 and left[call] > HABIT_FROM}
    once = [(r, b, a) for r, b, a in steps if made[alike(b), alike(a)] == 1 and (r, alike(b)) in habits]
    if any(after.is_exchange for _rank, _before, after in steps):
        made_by = Counter((rank, alike(before), alike(after)) for rank, before, after in steps)
        last = {rank: (rank, before, after) for rank, before, after in steps}
        new = [rank for rank, b, a in last.values() if made_by[rank, alike(b), alike(a)] == 1]
        once = [step for step in once if step == last[step[0]] and new == [step[0]]]
        known = {alike(before) for _rank, before, _after in steps}
        once = [(r, b, a) for r, b, a in once if alike(a) in known or not (a.is_exchange and "send" in a.op)]
    return once[0] if len(once) == 1 else None


def _have_left_the_loop(ranks: Collection[int], joined: Mapping[int, Collective], histories: Histories) -> bool:
    """Whether all these ranks were in the loop in which all the others are, and are not any more.

    Where both are in one more loop, the others may have come to its next turn instead, if a turn may do without that call.
    """
    inside = [collective.loops for rank, collective in joined.items() if rank not in ranks]
    if not inside or not inside[0] or len({loops[:1] for loops in inside}) > 1:
        return False
    loop, *further_out = inside[0]
    for rank in ranks:
        call = joined[rank]
        shared = [outer for outer in call.loops if outer in further_out]
        if loop in call.loops or not any(loop in c.loops for c in histories[rank]):
            return False
        if shared and shared[0] not in call.every_turn:
            return False
    return True


def _judged_by_others(joined: Mapping[int, Collective], histories: Histories) -> Parting:
    """The odd ones where ranks of other groups tell, which had come the same way."""
    odd = outvoted(histories)
    others = sorted(set(joined) - set(odd))
    at_their_first = any(in_time(histories[rank])[0] is collective for rank, collective in joined.items())
    if at_their_first or not others or any(joined.get(rank) is not collective for rank, collective in odd.items()):
        return Parting(joined)
    return Parting(joined, tuple(odd), f"after the same collectives most ranks of the job did as rank {others[0]}")


def outvoted(histories: Histories, alike: Callable[[Collective], object] | None = None) -> dict[int, Collective]:
    """The ranks that made another call than most, and that call, when all had made the same calls, whatever their groups;
    empty where there is no such majority, or where the beginning is not in the records any more. `alike` says what of two
    calls must be equal: operation and line, if it is not given."""
    same = alike or (lambda collective: collective.call)
    ways = {rank: in_time(history) for rank, history in sorted(histories.items())}
    if not all(way and way[0].seq == 1 for way in ways.values()):
        return {}
    for made in zip(*ways.values(), strict=False):
        call, votes = Counter(map(same, made)).most_common(1)[0]
        if votes < len(ways):
            odd = {rank: collective for rank, collective in zip(ways, made, strict=True) if same(collective) != call}
            return odd if 2 * votes > len(ways) else {}
    return {}


def _is_usual(now: Collective, joined: Mapping[int, Collective], histories: Histories) -> bool:
    """Whether any rank has made this very call after the same call before, when all still agreed."""
    followed: set[tuple[object, ...]] = set()
    last: set[object] = set()
    for rank in joined:
        calls = [c.call for c in histories[rank] if c.group == now.group and (c.setup, c.seq) < (now.setup, now.seq)]
        followed |= set(itertools.pairwise(calls))
        last |= set(calls[-1:])
    return any((call, now.call) in followed for call in last)
