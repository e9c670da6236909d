"""Says who owes a message where many exchange with one: a parameter server, a work queue, a gather by sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from .exchanges import times
from .finding import Odd, ranks_said, verb
from .standing import Standing, missing_in, peers, same_line


def of_any(standing: Standing) -> bool:
    """Whether this rank waits to receive of whichever rank sends."""
    calls = standing.rank.calls
    return standing.pairwise and bool(calls) and calls[-1].is_exchange and not calls[-1].ranks


def has_sent_fewer_to_a_server(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> Odd | None:
    """Where one rank waits to receive of whichever sends, and all others, three or more, are past it: who has sent it one message
    less than each of them."""
    servers = [n for n, s in waiting.items() if of_any(s)]
    if len(servers) != 1 or len(waiting) < max(len(at), 4):
        return None
    sent = {n: times(s, "send", servers[0]) for n, s in waiting.items() if n != servers[0] and not s.pairwise}
    usual = max(sent.values(), default=0)
    behind = tuple(n for n, times in sent.items() if times != usual)
    if len(sent) + 1 < len(at) or len(behind) != 1 or sent[behind[0]] + 1 != usual or usual < 3:
        return None
    met = f"it has sent {usual - 1} messages to rank {servers[0]}, which waits for one more"
    return behind, f"{met}, and each of the others {usual}"


def has_asked_too_often(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> Odd | None:
    """The rank that waits for one more message of one that is in a collective, and has sent it as many as each of the others has
    taken, who wait in a collective for it."""
    for number, waiter in waiting.items():
        for source in (p for p in peers(waiter) if waiter.pairwise and p in waiting and not waiting[p].pairwise):
            sent = {n: times(waiting[source], "send", n) for n in at if times(waiting[source], "send", n)}
            others = [n for n in sent if n != number]
            taken = all(times(at[n], "recv", source) == sent[n] == sent.get(number) for n in others)
            held_up = all(
                n in waiting and waiting[n].collective and number in missing_in(waiting[n], at, None) for n in others
            )
            if others and taken and held_up and times(waiter, "recv", source) == sent[number] + 1:
                met = f"rank {source} has sent it {sent[number]} messages, as many as {ranks_said(others).lower()} took"
                return (number,), f"it waits for one more, and {met}"
    return None


def has_left_one_without_an_answer(waiting: Mapping[int, Standing]) -> Odd | None:
    """The rank that waits to receive of one which waits to receive of it, at the line where others do: all ask it once for each
    message that they send, and it has answered each of the others as often as this one has asked, and this one once less."""
    receiving = _receiving(waiting)
    for left, standing in receiving.items():
        for server in (p for p in peers(standing) if p in receiving and left in peers(receiving[p])):
            asked = times(standing, "recv", server)
            answered = {
                n: times(receiving[server], "send", n)
                for n, s in receiving.items()
                if server in peers(s) and same_line(s.place, standing.place)
            }
            in_turn = all(times(receiving[n], "send", server) == times(receiving[n], "recv", server) for n in answered)
            others = {n: answers for n, answers in answered.items() if n != left}
            if others and in_turn and {*others.values()} == {asked} and answered[left] == asked - 1:
                met = f"it has answered {ranks_said(sorted(others)).lower()} {asked} times, and rank {left}"
                return (server,), f"{met}, which has asked as often and waits for it, {asked - 1} times"
    return None


def has_not_sent_as_others(waiting: Mapping[int, Standing]) -> Odd | None:
    """The rank that waits to receive of one which itself waits to receive of it, where others wait at the same line for that
    one and have sent it theirs."""
    receiving = _receiving(waiting)
    for number, waiter in receiving.items():
        for left in (p for p in peers(waiter) if p in receiving and number in peers(receiving[p])):
            alike = [
                n
                for n, s in receiving.items()
                if n not in (number, left) and number in peers(s) and same_line(s.place, receiving[left].place)
            ]
            own = times(receiving[left], "send", number)
            if alike and all(times(receiving[n], "send", number) == own + 1 for n in alike):
                met = f"rank {number} waits for a message of it such as {ranks_said(alike).lower()} sent"
                return (left,), f"{met}, {verb(alike, 'which waits', 'which wait')} at the same line"
    return None


def has_kept_an_answer(waiting: Mapping[int, Standing]) -> Odd | None:
    """The rank that waits to receive of whichever rank sends, and has sent to one that waits for it fewer messages, by those
    that came of it, than to each of the others, two or more."""
    for left, server in waiting.items():
        of_each = {n: times(server, "send", n) - times(server, "recv", n) for n in waiting if times(server, "recv", n)}
        for_it = [n for n, s in waiting.items() if left in peers(s) and s.rank.calls and "recv" in s.rank.calls[-1].op]
        behind = [n for n in for_it if n in of_each and {of_each[o] for o in of_each if o != n} == {of_each[n] + 1}]
        if of_any(server) and len(of_each) > 2 and len(behind) == 1:
            number = behind[0]
            met = ranks_said(sorted(of_each.keys() - {number})).lower()
            return (left,), f"for as many as came, it has sent one message less to rank {number} than to {met}"
    return None


def owes_the_one_behind(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> Odd | None:
    """Where one rank waits for messages of all others, and these, two or more, wait for exchanges further on, at one line: the
    only one of them that has not sent it one for which it has asked all as often, and had before."""
    if len(waiting) < max(len(at), 3) or not all(s.pairwise for s in waiting.values()):
        return None
    for number, behind in waiting.items():
        others = {n: s for n, s in waiting.items() if n != number}
        lines = {s.place for s in others.values()}
        asked = {n: _tags(behind, "recv", n) for n in others}
        sent = {n: _tags(s, "send", number) for n, s in others.items()}
        owing = [n for n in others if asked[n] - sent[n]]
        alike = all(asked[n] == asked[owing[0]] for n in others) if len(owing) == 1 else False
        if alike and len(lines) == 1 and behind.place not in lines and {*asked[owing[0]]} == {*sent[owing[0]]}:
            return (owing[0],), f"rank {number} waits for a message of it, such as all others have sent"
    return None


def _receiving(waiting: Mapping[int, Standing]) -> dict[int, Standing]:
    return {n: s for n, s in waiting.items() if s.pairwise and s.rank.calls and "recv" in s.rank.calls[-1].op}


def _tags(standing: Standing, op: str, peer: int) -> Counter[int]:
    """How often this rank has sent to `peer`, or begun to receive of it, by the tag."""
    return Counter(c.tag for c in standing.rank.exchanged_with(peer, op))
