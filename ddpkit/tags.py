"""Says whose tag is wrong, where one rank waits to send to another and that to receive of it, with different tags."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping

from .collectives import Collective
from .finding import Odd
from .standing import Standing


def of_another_tag(waiting: Mapping[int, Standing]) -> Odd | None:
    """The rank whose tag is not that of most, of its peer's same message with another rank, or the next in its own row."""
    last = {n: s.rank.calls[-1] for n, s in waiting.items() if s.pairwise and s.rank.calls}
    for sender, receiver in _past_each_other(last):
        pair = (sender, receiver)
        if found := _not_that_of_most(last) or _not_as_with_others(pair, waiting) or _out_of_its_row(pair, waiting):
            return found
    return None


def _past_each_other(last: Mapping[int, Collective]) -> Iterator[tuple[int, int]]:
    for n, call in last.items():
        for peer, to in last.items():
            one_way = "send" in call.op and call.ranks == (peer,) and "recv" in to.op and to.ranks == (n,)
            if one_way and call.tag != to.tag:
                yield n, peer


def _not_that_of_most(last: Mapping[int, Collective]) -> Odd | None:
    tags = {n: call.tag for n, call in last.items()}
    usual, times = Counter(tags.values()).most_common(1)[0]
    odd = tuple(n for n, tag in sorted(tags.items()) if tag != usual)
    if 2 * times <= len(tags):
        return None
    return odd, f"it sends and receives with tag {tags[odd[0]]}, the others with tag {usual}"


def _not_as_with_others(pair: tuple[int, int], waiting: Mapping[int, Standing]) -> Odd | None:
    """Held against the messages, as many as these two have had, that others sent this receiver, and it received of them."""
    sender, receiver = pair
    sent, asked = _tags(waiting[sender], "send", receiver), _tags(waiting[receiver], "recv", sender)
    others = [n for n in waiting if n not in pair]
    rows = [row for n in others for row in (_tags(waiting[n], "send", receiver), _tags(waiting[receiver], "recv", n))]
    same = {row[len(sent) - 1] for row in rows if len(row) >= len(sent)}
    if len(sent) != len(asked) or len(same) != 1 or not same & {sent[-1], asked[-1]}:
        return None
    usual = f"and so many messages on the others have tag {same.pop()}"
    if usual.endswith(f" {asked[-1]}"):
        return (sender,), f"it sends with tag {sent[-1]}, {usual}"
    return (receiver,), f"it receives with tag {asked[-1]}, {usual}"


def _out_of_its_row(pair: tuple[int, int], waiting: Mapping[int, Standing]) -> Odd | None:
    """The one of the two whose tag is not as far from that before as each of its tags so far, where the other's is. A tag that
    stays the same names a kind of message, and counts none."""
    sender, receiver = pair
    rows = {sender: _tags(waiting[sender], "send", receiver), receiver: _tags(waiting[receiver], "recv", sender)}
    steps = {n: [after - before for before, after in itertools.pairwise(row)] for n, row in rows.items()}
    odd = [n for n, by in steps.items() if len({*by}) > 1]
    if len(odd) != 1 or len({*steps[odd[0]][:-1]}) != 1 or any(by[:1] == [0] for by in steps.values()):
        return None
    number = odd[0]
    return (
        number,
    ), f"its tags so far were {', '.join(map(str, rows[number][-4:-1]))}, and this one is {rows[number][-1]}"


def _tags(standing: Standing, op: str, peer: int) -> list[int]:
    """The tags with which this rank has sent to `peer`, or begun to receive of it, in turn."""
    return [c.tag for c in standing.rank.calls if c.is_exchange and op in c.op and c.ranks == (peer,)]
