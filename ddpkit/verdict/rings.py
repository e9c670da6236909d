"""Says who has left a ring or a pipeline of sends and receives, in which each rank meets the same neighbours again and again."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping

from ddpkit.runfolder.calls import Collective

from .exchanges import times
from .finding import Odd
from .parting import outvoted
from .standing import Standing, peers

# So many sends and receives that all have made alike are a habit of theirs.
ALIKE_FROM = 4


def too_few_in_a_row(waiting: Mapping[int, Standing]) -> Odd | None:
    """The rank that went over from receiving of another to sending to it, or the other way round, sooner than ever before, while
    that one waits for the next message of a row such as ever."""
    for number, waiter in waiting.items():
        for left in peers(waiter) if waiter.pairwise else ():
            made = _in_a_row(waiting[left], number) if left in waiting else []
            awaited = _in_a_row(waiter, left)
            if not made or not awaited or made[-1][0] == {"send": "recv", "recv": "send"}[awaited[-1][0]]:
                continue
            theirs = [times for op, times in awaited if op == awaited[-1][0]]
            own = [times for op, times in made if op != awaited[-1][0]]
            usual = {*own[:-1], *theirs[:-1]}
            if own[:-1] and len(usual) == 1 and own[-1] + 1 == theirs[-1] <= min(usual):
                of_them = f"exchange {theirs[-1]} of {min(usual)} in a row with it"
                return (left,), f"rank {number} waits for {of_them}, as ever before"
    return None


def one_too_many_in_a_row(waiting: Mapping[int, Standing]) -> Odd | None:
    """The rank that waits for one more message in a row of another, or to send it one more, than in every row before, where that
    one has made as many as ever, and has gone on to a collective or, where rows are longer than one, turned round."""
    for number, waiter in waiting.items():
        for peer in peers(waiter) if waiter.pairwise else ():
            made = _in_a_row(waiting[peer], number) if peer in waiting else []
            turned_round = bool(made) and waiting[peer].pairwise
            made = made[:-1] if turned_round else made
            *before, (_op, times) = _in_a_row(waiter, peer) or [("", 0)]
            usual = {n for _op, n in (*before, *made)}
            if made and len(before) > 1 and usual == {times - 1} and times > 1 + turned_round:
                return (number,), f"it waits for exchange {times} in a row with rank {peer}, one more than ever before"
    return None


def _in_a_row(standing: Standing, peer: int) -> list[tuple[str, int]]:
    """How many times in a row this rank has sent to `peer` or received of it, in turn."""
    return [(op, len(list(row))) for op, row in itertools.groupby(_ops_with(standing, peer))]


def has_turned_round_too_soon(waiting: Mapping[int, Standing]) -> Odd | None:
    """Of two ranks that wait to send to each other, as in a pipeline, the one that has not received the last of the messages that
    the other sends it, which are as many as came to that from a third rank."""
    sending = {n: s for n, s in waiting.items() if s.pairwise and s.rank.calls and "send" in s.rank.calls[-1].op}
    found = []
    for number, waiter in sending.items():
        for left in (p for p in peers(waiter) if p in sending and number in peers(sending[p])):
            sent = times(waiter, "send", left)
            third = [n for n in waiting if n != left and times(waiter, "recv", n) == sent]
            if third and times(sending[left], "recv", number) == sent - 1:
                found.append(
                    (left, f"rank {number} has {sent} messages of rank {third[0]} to pass on to it, not {sent - 1}")
                )
    return ((found[0][0],), found[0][1]) if len(found) == 1 else None


def has_passed_on_fewer(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> Odd | None:
    """Where all ranks wait in a ring, each to receive of the one before it: who has sent fewer messages on than all others."""
    receiving = {n: s.rank.calls[-1] for n, s in waiting.items() if s.pairwise and s.rank.calls}
    before = {n: c.ranks[0] for n, c in receiving.items() if "recv" in c.op and c.ranks}
    ring, number = [], min(at)
    while number in before and number not in ring:
        ring.append(number)
        number = before[number]
    if len(ring) < max(len(at), 3) or number != ring[0]:
        return None
    sent = {before[n]: times(waiting[before[n]], "send", n) for n in ring}
    fewest = min(sent.values())
    behind = [n for n, times in sent.items() if times == fewest]
    if len(behind) != 1 or len(set(sent.values())) != 2:
        return None
    return tuple(behind), f"it has sent {fewest} messages on, and each of the others {max(sent.values())}"


def has_left_the_ring(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> Odd | None:
    """The one of three ranks or more whose next call is another than that of all others, where all had made the same calls and
    exchanged with the same neighbours, counted from each: as in a ring."""
    if len(waiting) < max(len(at), 3):
        return None
    ways = {n: [_seen_from(n, call, len(at)) for call in s.rank.calls] for n, s in waiting.items()}
    for number, made in enumerate(zip(*ways.values(), strict=False)):
        (usual, votes), *others = Counter(made).most_common()
        if not others:
            continue
        rank = next(n for n, call in zip(ways, made, strict=True) if call != usual)
        exchanged = sum(call.is_exchange for call in waiting[rank].rank.calls[:number])
        if exchanged < ALIKE_FROM or votes < len(at) - 1:
            return None
        call, theirs = (waiting[n].rank.calls[number] for n in (rank, next(n for n in ways if n != rank)))
        came = f"it came to {call.name}{call.from_line}, and all others to {theirs.op}{theirs.from_line}"
        return (rank,), f"after {number} calls alike {came}"
    return None


def _seen_from(number: int, call: Collective, world_size: int) -> tuple[object, ...]:
    """What a call does, with how far a neighbour."""
    return (*call.call, call.tag, *((rank - number) % world_size for rank in call.ranks if call.is_exchange))


def has_named_another(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> Odd | None:
    """The rank that has sent to one that never asked it for a message, and never to one that waits for it; or that has asked one
    that never sent to it, and never the one that did; or both: where all else that ranks have exchanged has met."""
    exchanges = [(n, c) for n, s in waiting.items() for c in s.rank.calls if c.is_exchange]
    # A message from whichever rank sends may be anybody's.
    if len(waiting) < max(len(at), 3) or not all(call.ranks for _n, call in exchanges):
        return None
    sent = {(n, call.ranks[0]) for n, call in exchanges if "send" in call.op}
    asked = {(call.ranks[0], n) for n, call in exchanges if "recv" in call.op}
    if not sent & asked:
        return None
    if len(sent - asked) == 2 and asked - sent == {(to, source) for source, to in sent - asked}:
        return _swaps_with_another(sent - asked)
    if len(sent - asked) != 1 or len(asked - sent) != 1:
        return None
    ((source, to),), ((of, asker),) = sent - asked, asked - sent
    if source == of:
        return (source,), f"it sends to rank {to}, which never asks it for a message, and not to rank {asker}"
    if to == asker:
        return (asker,), f"it asks rank {of} for a message, which never sends it any, and not rank {source}"
    return None


def _swaps_with_another(swaps: Collection[tuple[int, int]]) -> Odd | None:
    """Of two ranks that want to swap with one that never does with them, as (who, with whom): the one that the other wants."""
    wanted = [number for number, _other in swaps if number in {other for _number, other in swaps}]
    if len(wanted) != 1:
        return None
    number, to = next(swap for swap in swaps if swap[0] == wanted[0])
    left = next(n for n, _other in swaps if n != number)
    return (number,), f"it wants to swap with rank {to}, which never does with it, and rank {left} with it"


def has_changed_its_turn(waiting: Mapping[int, Standing]) -> Odd | None:
    """Of two ranks that wait for each other, the one whose last send or receive with the other follows on that before as none of
    theirs ever did."""
    for number, waiter in waiting.items():
        for peer in (p for p in peers(waiter) if p in waiting and number in peers(waiting[p])):
            made = {n: _ops_with(waiting[n], other) for n, other in ((number, peer), (peer, number))}
            new = [n for n, ops in made.items() if tuple(ops[-2:]) not in [*itertools.pairwise(ops)][:-1]]
            if len(new) == 1 and new[0] == number and min(map(len, made.values())) > ALIKE_FROM:
                before, now = made[number][-2:]
                return (number,), f"with rank {peer} it came from {before} to {now}, as it never had"
    return None


def _ops_with(standing: Standing, peer: int) -> list[str]:
    return [c.op.lstrip("i") for c in standing.rank.exchanged_with(peer)]


def has_a_new_neighbour(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> Odd | None:
    """Where all ranks wait to exchange, the one that waits for a rank with which it never did before, nor that with it, after
    many exchanges, where each of the others waits for those that it has always met."""
    if len(waiting) < max(len(at), 3) or not all(s.pairwise for s in waiting.values()):
        return None
    met = {n: Counter(peer for c in s.rank.calls if c.is_exchange for peer in c.ranks) for n, s in waiting.items()}
    new = [(n, peer) for n, s in waiting.items() for peer in peers(s) if peer in met and not met[peer][n]]
    if len(new) != 1 or min(sum(with_whom.values()) for with_whom in met.values()) < 2 * ALIKE_FROM:
        return None
    ((number, peer),) = new
    return (number,), f"it waits to exchange with rank {peer}, as never before, and as that has never done with it"


def on_one_side(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> bool:
    """Whether each rank waits to send to one that waits to send, or all so to receive, after as many sends and receives, two at
    the same line: then nobody alone is at fault."""
    last = {n: s.rank.calls[-1] for n, s in waiting.items() if s.pairwise and s.rank.calls}
    if not len(last) == len(waiting) == len(at):
        return False
    for number, call in last.items():
        partner = last.get(call.ranks[0]) if call.ranks else None
        if partner is None or partner.op != call.op or (len(at) == 2 and partner.call != call.call):
            return False
        made, theirs = (Counter(c.op for c in at[n].rank.calls) for n in (number, call.ranks[0]))
        if made != theirs:
            return False
    return True


def out_of_step(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> tuple[int, ...]:
    """The one rank that came to a send or receive while most came to a collective, or the other way round, where all had
    exchanged before and come to a collective after it, each with as many exchanges as the others: as in a ring, or in pairs."""
    histories = {n: s.rank.calls for n, s in waiting.items()}
    odd = outvoted(histories, lambda call: call.is_exchange or call.call) if len(waiting) == len(at) else {}
    if len(odd) != 1:
        return ()
    ((number, last),) = odd.items()
    *before, newest = histories[number]
    in_rounds = any(one.is_exchange and not then.is_exchange for one, then in itertools.pairwise(before))
    return (number,) if newest is last and in_rounds else ()
