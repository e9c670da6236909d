"""Says whose tag is wrong, where one rank waits to send to another and that to receive of it, with different tags."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from ddpkit.runfolder.calls import Collective

from .finding import Odd
from .standing import Standing, peers


def of_another_tag(waiting: Mapping[int, Standing]) -> Odd | None:
    """The rank whose tag is not the next in its own row, that of its peer's same message with another rank, or that of most."""
    last = {n: s.rank.calls[-1] for n, s in waiting.items() if s.pairwise and s.rank.calls}
    for pair in itertools.permutations(last, 2):
        if not _past_each_other(pair, waiting):
            continue
        if found := _out_of_its_row(pair, waiting) or _not_as_with_others(pair, waiting) or _not_that_of_most(last):
            return found
    return None


def sent_to_another(waiting: Mapping[int, Standing]) -> Odd | None:
    """The rank that has sent to one, which never asked for that, a message with the tag with which another waits for it, where it
    has sent with this tag to one rank alone."""
    calls = [(n, c) for n, s in waiting.items() for c in s.rank.calls if c.is_exchange and c.ranks]
    sent = Counter((n, c.ranks[0], c.tag) for n, c in calls if "send" in c.op)
    asked = Counter((c.ranks[0], n, c.tag) for n, c in calls if "recv" in c.op)
    unasked, unsent = sent - asked, asked - sent
    for source, to, tag in unasked:
        waits = [n for n, s in waiting.items() if s.pairwise and (source, n, tag) in unsent and source in peers(s)]
        once = len({other for one, other, its in sent if (one, its) == (source, tag)}) == 1
        if tag and once and len(waits) == 1 and waits[0] != to:
            it = f"it sent with tag {tag} to rank {to}, which never asked for that"
            return (source,), f"{it}, and rank {waits[0]} waits for it with that tag"
    return None


def _past_each_other(pair: tuple[int, int], waiting: Mapping[int, Standing]) -> bool:
    """Whether the first of these waits for the second and that for it, which has asked for as many messages as it has sent, and
    for others."""
    sender, receiver = pair
    sent, asked = _tags(waiting[sender], "send", receiver), _tags(waiting[receiver], "recv", sender)
    each_other = receiver in peers(waiting[sender]) and sender in peers(waiting[receiver])
    return each_other and len(sent) == len(asked) and sorted(sent) != sorted(asked) and sent[-1] != asked[-1]


def _out_of_its_row(pair: tuple[int, int], waiting: Mapping[int, Standing]) -> Odd | None:
    """The one of the two whose tag does not follow on that before as ever, where the other's does. A tag that stays the same
    names a kind of message, and follows on none."""
    sender, receiver = pair
    rows = {sender: _tags(waiting[sender], "send", receiver), receiver: _tags(waiting[receiver], "recv", sender)}
    if any(len({*row[:-1]}) < 2 for row in rows.values()):
        return None
    odd = [n for n, row in rows.items() if not _goes_on(row)]
    if len(odd) != 1:
        return None
    number, row = odd[0], rows[odd[0]]
    return (number,), f"its tags so far were {', '.join(map(str, row[-4:-1]))}, and this one is {row[-1]}"


def _goes_on(row: Sequence[int]) -> bool:
    """Whether the last of these, two or more, follows on that before as it always did, or where that is new, by as much as each
    so far."""
    *steps, (before, last) = itertools.pairwise(row)
    if followed_by := {after for at, after in steps if at == before}:
        return followed_by == {last}
    return {after - at for at, after in steps} == {last - before}


def _not_as_with_others(pair: tuple[int, int], waiting: Mapping[int, Standing]) -> Odd | None:
    """Held against the messages, as many as these two have had, that others sent this receiver, and it received of them."""
    sender, receiver = pair
    sent, asked = _tags(waiting[sender], "send", receiver), _tags(waiting[receiver], "recv", sender)
    others = [n for n in waiting if n not in pair]
    rows = [row for n in others for row in (_tags(waiting[n], "send", receiver), _tags(waiting[receiver], "recv", n))]
    same = {row[len(sent) - 1] for row in rows if len(row) >= len(sent)}
    if len(same) != 1 or not same & {sent[-1], asked[-1]}:
        return None
    usual = same.pop()
    others_have = f"and so many messages on the others have tag {usual}"
    if usual == asked[-1]:
        return (sender,), f"it sends with tag {sent[-1]}, {others_have}"
    return (receiver,), f"it receives with tag {asked[-1]}, {others_have}"


def _not_that_of_most(last: Mapping[int, Collective]) -> Odd | None:
    tags = {n: call.tag for n, call in last.items()}
    usual, times = Counter(tags.values()).most_common(1)[0]
    odd = tuple(n for n, tag in sorted(tags.items()) if tag != usual)
    if 2 * times <= len(tags):
        return None
    return odd, f"it sends and receives with tag {tags[odd[0]]}, the others with tag {usual}"


def _tags(standing: Standing, op: str, peer: int) -> list[int]:
    """The tags with which this rank has sent to `peer`, or begun to receive of it, in turn."""
    return [c.tag for c in standing.rank.exchanged_with(peer, op)]
