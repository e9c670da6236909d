"""Says who has made a send or receive too few or too many, where every rank waits in a collective or to exchange."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from ddpkit.runfolder.calls import Collective

from .finding import Odd, ranks_said
from .parting import outvoted
from .standing import Standing, missing_in, peers, same_line

# Whether it sends or receives, and the other rank, None where that is whichever sends.
Exchange = tuple[str, int | None]
# `rank - 1`, `(self.rank + 1) % size`.
_WITH_A_NEIGHBOUR = re.compile(r"\brank\)?\s*[-+^]")


def without_an_exchange(waiting: Mapping[int, Standing]) -> tuple[int, ...]:
    """The rank with which another waits to exchange, if it went on to its collective without the send or receive that most
    of the others had made by then."""
    for number, waiter in waiting.items():
        others = {n: s.rank.calls for n, s in waiting.items() if n != number}
        partners = peers(waiter) if waiter.pairwise else ()
        for peer, call in outvoted(others).items() if others else ():
            if peer in partners and call is waiting[peer].collective:
                return (peer,)
    return ()


def lost_with_its_handle(waiting: Mapping[int, Standing]) -> Odd | None:
    """The one rank that has begun the very message for which another waits, and has let go of its handle: gloo then gives up what
    is not over."""
    found: dict[int, Collective] = {}
    for number, waiter in waiting.items():
        awaited = _under_way(waiter)
        if awaited is None or any(c.backend == "nccl" for c in waiter.rank.collectives):
            continue
        for peer in (p for p in peers(waiter) if awaited.ranks == (p,) and p in waiting):
            op, its_op = ("send", "recv") if "send" in awaited.op else ("recv", "send")
            begun = [c for c in waiter.rank.exchanged_with(peer, op) if c.tag == awaited.tag]
            its = [c for c in waiting[peer].rank.exchanged_with(number, its_op) if c.tag == awaited.tag]
            if len(its) >= len(begun) and its[len(begun) - 1].freed:
                found[peer] = its[len(begun) - 1]
    if len(found) != 1:
        return None
    ((peer, lost),) = found.items()
    how = f"it let go of the handle of {lost.name}{lost.from_line} without a wait, and the message went with it"
    return (peer,), how


def _under_way(waiter: Standing) -> Collective | None:
    """The send or receive in which this rank waits; None where it waits in none, or may in one of several kinds or ranks."""
    made = waiter.rank.calls if waiter.pairwise else ()
    if made and made[-1].op in ("send", "recv"):
        return made[-1]
    kept = [c for c in made if c.is_exchange and c.op.startswith("i") and not c.freed]
    return kept[-1] if len({(c.op, c.ranks) for c in kept}) == 1 else None


def ends_a_chain(number: int, waiting: Mapping[int, Standing]) -> bool:
    """Whether `number` may be one end of a chain and a rank that waits to exchange with it the other, as each has swapped with
    some rank, but never they with each other: who takes it for a ring waits in vain, and so does who is left in a ring."""
    here = waiting.get(number)
    if here is None or here.pairwise or not _swaps(_last_round(here)):
        return False
    for_it = (s for s in waiting.values() if s.pairwise and number in peers(s))
    return any(_swaps(_last_round(s)) - {number} and not times(here, "", s.rank.rank) for s in for_it)


def with_one_more(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> tuple[int, ...]:
    """The rank that makes one more send or receive with a peer than most of the others have made with it, and for which that
    peer waits in their next collective."""
    for number, waiter in waiting.items():
        for peer in peers(waiter) if waiter.pairwise else ():
            if peer not in waiting or missing_in(waiting[peer], at, None) != [number]:
                continue
            odd = outvoted({n: s.rank.calls for n, s in waiting.items() if n != peer}, _partners)
            made = waiter.rank.calls
            if list(odd) == [number] and odd[number] is made[-1] and _partners(made[-1]) in map(_partners, made[:-1]):
                return (number,)
    return ()


def out_of_an_exchange(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> Odd | None:
    """Where each rank waits in a collective of all or to exchange: who alone wants to exchange with several, or has left them
    at it."""
    there = [n for n, s in waiting.items() if s.collective and set(s.collective.ranks) == set(at)]
    exchanging = {n: s for n, s in waiting.items() if s.pairwise}
    if len(waiting) < len(at):
        return None
    awaited = {n: missing_in(waiting[n], at, None) for n in there}
    for_it = {left: [n for n, s in exchanging.items() if left in peers(s) and n in awaited[left]] for left in there}
    if len(there) + len(exchanging) < len(at):
        return _has_had_fewer(for_it, waiting)
    if len(exchanging) == 1 and len(there) > 1:
        ((number, waiter),) = exchanging.items()
        if len(peers(waiter)) > 1 and set(peers(waiter)) <= set(there):
            met = " and ".join(map(str, peers(waiter)))
            return (number,), f"it waits to exchange with ranks {met}, and none of them with it"
    return _left_an_exchange(for_it, waiting, at)


def is_first_to_exchange(waiter: Standing, at: Mapping[int, Standing]) -> bool:
    """Whether this rank waits in its first exchange, with a neighbour, as ranks of other numbers do at that line, and no other
    rank has made any."""
    made = {n: sum(c.is_exchange for c in s.rank.calls) for n, s in at.items()}
    with_a_neighbour = waiter.place is not None and bool(_WITH_A_NEIGHBOUR.search(waiter.place.source))
    return with_a_neighbour and made.pop(waiter.rank.rank) == 1 and not any(made.values())


def comes_sooner_than_ever(waiter: Standing) -> bool:
    """Whether this rank waits in an exchange to which it came after fewer collectives than before each of the exchanges, three or
    more, that it had made in turn with these."""
    runs = [(one, len(list(run))) for one, run in itertools.groupby(waiter.rank.calls, lambda call: call.is_exchange)]
    # What comes before the first exchange may be another part of the program.
    between = [times for exchanges, times in runs if not exchanges][1:]
    if not waiter.pairwise or len(between) < 3 or not runs[-1][0]:
        return False
    *before, last = between
    return len({*before}) == 1 and last < before[0]


def has_another_partner(waiting: Mapping[int, Standing]) -> Odd | None:
    """The rank that waits to send to and receive of one that has gone on, as that and a third have swapped with each other
    since the collective before, in as many exchanges as ever."""
    for number, waiter in waiting.items():
        for left in (p for p in peers(waiter) if waiter.pairwise and p in waiting and not waiting[p].pairwise):
            *before, done = [each for each in _rounds(waiting[left]) if each] or [[]]
            as_ever = bool(before) and {len(each) for each in before} == {len(done)}
            met = _swaps(done)
            if not as_ever or _to_swap_with(waiter) != {left} or len(met) != 1 or number in met:
                continue
            other = met.pop()
            if other in waiting and _swaps(_last_round(waiting[other])) == {left}:
                how = f"it waits to exchange with rank {left}, which has exchanged with rank {other}, and that with it"
                return (number,), how
    return None


def has_broken_the_pairs(waiting: Mapping[int, Standing]) -> Odd | None:
    """The rank whose next partner has swapped with another one, while the only rank that is left wants to swap with it, where all
    ranks swap in pairs, and have had the right partners before."""
    turns = {n: _swaps_in_turn(s) for n, s in waiting.items()}
    for number, turn in enumerate(itertools.zip_longest(*turns.values())):
        with_whom = dict(zip(turns, turn, strict=True))
        fitting = {n for n, peer in with_whom.items() if with_whom.get(peer) == n}
        if fitting == {*turns}:
            continue
        odd = [n for n, peer in with_whom.items() if n not in fitting and peer in fitting]
        left = [n for n in with_whom if n not in fitting and n not in odd]
        if not number or len(odd) != 1 or len(left) != 1 or with_whom[left[0]] != odd[0]:
            return None
        to, third = with_whom[odd[0]], with_whom[with_whom[odd[0]]]
        how = f"it wants to swap with rank {to}, which has swapped with rank {third}, and rank {left[0]} with it"
        return (odd[0],), how
    return None


def _swaps_in_turn(standing: Standing) -> list[int]:
    """The ranks to which this one has sent and of which it has received, in turn, or begun to; empty where it has made anything
    else with any."""
    made = [(c.op.lstrip("i"), c.ranks[0]) for c in standing.rank.calls if c.is_exchange and c.ranks]
    swaps = list(zip(made[::2], made[1::2], strict=False))
    if any({one[0], other[0]} != {"send", "recv"} or one[1] != other[1] for one, other in swaps):
        return []
    return [peer for (_op, peer), _other in swaps] + [peer for _op, peer in made[2 * len(swaps) :]]


def _to_swap_with(waiter: Standing) -> set[int | None]:
    """The ranks that it has swapped with since the collective before or, where it swapped with one in every round before, with
    which it has only begun to."""
    *before, now = _rounds(waiter)
    in_pairs = any(before) and all(len(_swaps(made)) == 1 for made in before if made)
    return {peer for _op, peer in now} if in_pairs else {*_swaps(now)}


def _swaps(made: Sequence[Exchange]) -> set[int]:
    """The ranks to which one of these exchanges sends and of which another receives."""
    with_each = {peer: {op for op, other in made if other == peer} for _op, peer in made if peer is not None}
    return {peer for peer, ops in with_each.items() if {"send", "recv"} <= ops}


def _last_round(standing: Standing) -> list[Exchange]:
    return next(reversed(_rounds(standing)), [])


def _rounds(standing: Standing, by: object = None) -> list[list[Exchange]]:
    """What this rank exchanged, and with whom, before each of its collectives, or of those `by` this call, and, where it is in
    no collective, since."""
    rounds: list[list[Exchange]] = [[]]
    for call in standing.rank.calls:
        if not call.is_exchange and by in (None, call.call):
            rounds.append([])
        elif call.is_exchange:
            rounds[-1].append((call.op.lstrip("i"), call.ranks[0] if call.ranks else None))
    return rounds if standing.pairwise else rounds[:-1]


def _has_had_fewer(for_it: Mapping[int, Sequence[int]], waiting: Mapping[int, Standing]) -> Odd | None:
    """The rank in a collective of all, while others are held up in those of a group, if the messages between it and one that
    waits `for_it` tell that it went on too soon."""
    for left, number in ((left, number) for left, numbers in for_it.items() for number in numbers):
        here = waiting[left]
        if way := _fewer_than_ever(here, waiting[number], by=here.collective.call if here.collective else None):
            return (left,), f"rank {number} {way}"
    return None


def _left_an_exchange(
    for_it: Mapping[int, Sequence[int]], waiting: Mapping[int, Standing], at: Mapping[int, Standing]
) -> Odd | None:
    """The rank in a collective of all while others wait `for_it` to exchange, if that are several, or the messages between it and
    one of them tell that it went on too soon."""
    for left, numbers in for_it.items():
        if len(for_it) == 1 and len(numbers) > 1:
            return (left,), f"ranks {' and '.join(map(str, numbers))} still wait to exchange with it"
        rules = [_passed_on_too_few, _fewer_than_ever, _kept_one]
        if len(for_it) == 1 and len(waiting) > 2:
            rules.insert(0, _owed)
        for number in numbers:
            ways = (rule(waiting[left], waiting[number]) for rule in rules)
            if (
                way := next(filter(None, ways), "")
                or _gave_others_more(left, number, at)
                or _one_send_less(left, waiting)
                or _one_of_as_many_as_ever(left, number, waiting)
                or _came_from_the_rest(left, number, waiting, at)
            ):
                return (left,), f"rank {number} {way}"
    return None


def _owed(left: Standing, waiter: Standing) -> str:
    """What `left` owes to a rank that has sent it messages, and gets as many back with the one it waits for; "" where nothing
    is owed."""
    made = [c.op.lstrip("i") for c in waiter.rank.exchanged_with(left.rank.rank)]
    sent = made.count("send")
    if made[-1:] != ["recv"] or sent != made.count("recv") or sent < 2:
        return ""
    return f"has sent it {sent} messages, has {sent - 1} back, and waits for one more"


def _fewer_than_ever(left: Standing, waiter: Standing, by: object = None) -> str:
    """What `waiter` waits for, if `left` had one exchange less with it before its last collective, of those `by` this call, than
    before each earlier one; "" where it had not."""
    made, awaited = _in_rounds(left, waiter.rank.rank, by=by), _in_rounds(waiter, left.rank.rank, by=by)
    # What comes before the first exchange may be another part of the program.
    made, awaited = (list(itertools.dropwhile(lambda times: not times, rounds)) for rounds in (made, awaited))
    usual = awaited[-1] if awaited else 0
    if not made[:-1] or {*made[:-1], *awaited} != {usual} or made[-1] + 1 != usual:
        return ""
    return f"waits for exchange {usual} of {usual} with it, as many as in every round before"


def _passed_on_too_few(left: Standing, waiter: Standing) -> str:
    """What `waiter` waits to receive, if `left` sent it as many messages as it received from another rank before each earlier
    collective, and fewer before its last; "" where it did not."""
    number = waiter.rank.rank
    sent = _in_rounds(left, number, "send")
    if not any(sent[:-1]) or not waiter.rank.calls or "recv" not in waiter.rank.calls[-1].op:
        return ""
    for source in sorted({c.ranks[0] for c in left.rank.calls if c.is_exchange and c.ranks} - {number}):
        came = _in_rounds(left, source, "recv")
        if came[:-1] == sent[:-1] and came[-1] > sent[-1]:
            passed = f"{sent[-1]} of {came[-1]} messages that came to it from rank {source}"
            return f"waits for one more of it, which has passed on {passed}, in every round before all"
    return ""


def _kept_one(left: Standing, waiter: Standing) -> str:
    """What `waiter` waits to receive, if `left` passed every message of another rank on to it as it came, but one, or from one on
    no more, or sent it one for every few of them, but none for the last; "" where it did not."""
    number = waiter.rank.rank
    if not waiter.rank.calls or "recv" not in waiter.rank.calls[-1].op:
        return ""
    made = [(c.op.lstrip("i"), c.ranks) for c in left.rank.calls if c.is_exchange]
    for source in sorted({ranks[0] for op, ranks in made if op == "recv" and ranks} - {number}):
        come, on = ("recv", (source,)), ("send", (number,))
        way = [one for one in made if one in (come, on)]
        passed = way.count(on)
        kept_the_rest = way == [come, on] * passed + [come] * (way.count(come) - passed)
        kept_one = passed == way.count(come) - 1 == sum(pair == (come, on) for pair in itertools.pairwise(way))
        if way.count(come) > passed > 1 and (kept_the_rest or kept_one):
            of_them = f"{passed} of {way.count(come)} messages from rank {source}"
            return f"waits for one more of it, which has passed on {of_them}"
        *before, last = [len(list(run)) for one, run in itertools.groupby(way) if one == come] or [0]
        every = {*before} if way.count(on) == len(before) > 1 and way[-1] == come else set()
        if len(every) == 1 and last <= before[0]:
            of_them = f"one for every {before[0]} messages from rank {source}, and none for the last {last}"
            return f"waits for one more of it, which has sent it {of_them}"
    return ""


def _gave_others_more(left: int, number: int, at: Mapping[int, Standing]) -> str:
    """What rank `number` waits to receive, if each of the others, two or more, has received so many more messages of `left` than
    it sent to it, one more than this one; "" where they have not."""
    balance = {
        n: times(s, "recv", left) - times(s, "send", left)
        for n, s in at.items()
        if n not in (left, number) and times(s, "recv", left)
    }
    calls = at[number].rank.calls
    own = times(at[number], "recv", left) - times(at[number], "send", left)
    taken = times(at[left], "recv", number) == times(at[number], "send", left)
    # The one that it waits for is counted.
    if len(balance) < 2 or set(balance.values()) != {own} or not taken or not calls or "recv" not in calls[-1].op:
        return ""
    met = " and ".join(map(str, sorted(balance)))
    return f"waits for one more of it, as ranks {met} have received for as many as they sent"


def _one_send_less(left: int, waiting: Mapping[int, Standing]) -> str:
    """What is waited for, if since the collective before all the others, two or more, have sent and received alike, as often, and
    `left` has sent one message less; "" where they have not."""
    made = {n: Counter(op for op, _other in _last_round(s)) for n, s in waiting.items()}
    usual, *others = [ops for n, ops in made.items() if n != left] or [Counter()]
    if not others or any(ops != usual for ops in others) or made[left] + Counter(["send"]) != usual:
        return ""
    sent = f"it has sent {made[left]['send']} since the collective before, and each of the others {usual['send']}"
    return f"waits for one more of it: {sent}"


def _one_of_as_many_as_ever(left: int, number: int, waiting: Mapping[int, Standing]) -> str:
    """What rank `number` does, if it has met as many ranks since the collective before as in each round, two or more, with `left`
    as the last of them, once, and no rank but these waits for it; "" where that is not so."""
    *before, now = [[peer for _op, peer in made] for made in _rounds(waiting[number]) if made] or [[]]
    for_it = {n for n, s in waiting.items() if s.pairwise and number in peers(s)}
    as_ever = len(before) > 1 and {len({*met}) for met in before} == {len({*now})} != {1}
    if not as_ever or now.count(left) != 1 or not for_it <= {*now}:
        return ""
    return f"waits for it, as one of the {len({*now})} that it meets in every round"


def _came_from_the_rest(left: int, number: int, waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> str:
    """What rank `number` waits to receive, if since the collective before it has received of all others at the line where it
    waits, each had to do with it alone, and is in the collective of `left`, which made no exchange; "" where that is not so."""
    rest = {n for n in at if n not in (left, number)}
    calls = waiting[number].rank.calls
    if not calls or "recv" not in calls[-1].op:
        return ""
    *now, last = calls[-len(_last_round(waiting[number])) :]
    came_of = {c.ranks[0] for c in now if "recv" in c.op and c.ranks and same_line(c.where, last.where)}
    with_it_alone = all(
        n in waiting and not waiting[n].pairwise and {peer for _op, peer in _last_round(waiting[n])} == {number}
        for n in rest
    )
    if not rest or came_of != rest or not with_it_alone or _last_round(waiting[left]):
        return ""
    return f"waits for a message of it at the line where that of {ranks_said(sorted(rest)).lower()} came"


def times(standing: Standing, op: str, peer: int) -> int:
    """How often this rank has sent to `peer`, or begun to receive of it; with "" as `op`, either."""
    return len(standing.rank.exchanged_with(peer, op))


def _in_rounds(standing: Standing, peer: int, op: str = "", by: object = None) -> list[int]:
    """How often this rank exchanged with `peer`, or made `op`, before each of its collectives, or of those `by` this call, and,
    where it is in no collective, since."""
    return [sum(other == peer and op in made for made, other in each) for each in _rounds(standing, by)]


def _partners(call: Collective) -> tuple[object, ...]:
    """What a call does and with whom, from whatever line."""
    return (call.op, call.ranks)
