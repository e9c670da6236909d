"""Says which rank met the others in another collective, or with other sizes, where gloo or torch says that one did."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .collectives import Collective, Parting, parting
from .finding import Finding, against_most, ranks_said, undecided, verb
from .frames import Frame
from .records import Rank
from .standing import same_line

_COUNTS = re.compile(r"Rank (\d+) has (\d+) params, while rank (\d+) has inconsistent (\d+) params")
_TOO_LONG = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_SEGMENT_BYTES = 1 << 20
_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2}
_BYTES |= {"Short": 2, "Byte": 1, "Char": 1, "Bool": 1}
# After these the sender goes on, whether the others have come or not.
_ONE_SENDS = ("broadcast", "scatter", "gather", "reduce")
_REFERENCE = re.compile(
    r"params\[(\d+)\] .*with (?:sizes|strides) (\[[\d, ]*\]) appears not to match \w+ of the same param in process 0"
)


def find_parting(ranks: Sequence[Rank]) -> Finding:
    """Who met others in another collective, where gloo or torch has said that somebody did.

    Where neither collectives nor sizes say it, the lines at which the ranks were must tell.
    """
    if parted := parting(_histories(ranks)):
        return parted_at(parted)
    if counts := _parameter_counts(ranks):
        return _by_parameter_count(counts, ranks)
    told = {r.rank: found for r in ranks if r.failure and (found := _REFERENCE.search(r.failure.message))}
    if told:
        return _against_the_first({rank: (found[1], found[2]) for rank, found in told.items()}, ranks)
    if finding := _by_length(ranks):
        return finding
    lines = {r.rank: where for r in ranks if (where := _failed_line(r))}
    if shared := _line_that_all_reached(lines, ranks):
        return undecided(f"The ranks met in one collective with different sizes, at {shared.text}.", "mismatch")
    camps: dict[str, list[int]] = {}
    for rank, where in lines.items():
        camps.setdefault(where.text, []).append(rank)
    by_size = sorted(camps.values(), key=len)
    said = "; ".join(f"rank {n} was at {where.text}" for n, where in sorted(lines.items()))
    opening = f"The ranks met in different collectives: {said}."
    # Who sends to others and who receives from them are in different lines by their roles.
    exchange = any(r.calls and r.calls[-1].is_exchange for r in ranks)
    if not exchange and len(by_size) > 1 and len(lines) == len(ranks) and len(by_size[-1]) > len(by_size[-2]):
        return Finding(tuple(sorted(n for camp in by_size[:-1] for n in camp)), opening, "mismatch")
    return undecided(opening, "mismatch")


def _by_length(ranks: Sequence[Rank]) -> Finding | None:
    """Who differs where gloo aborted a rank for a message that was too long for it, and another rank's send was so long: the
    lengths of what each sent to it last, or of that send, and of the room that it had. Where one rank alone has sent it
    messages, those to whom the same rank sent as long a one, and who had room for it, tell too; and so do those who wait to
    receive from others at the line of the aborted rank, and those who send to others what had been as long as its own before."""
    for aborted in ranks:
        found = _TOO_LONG.search(aborted.stderr)
        if aborted.collectives or not found:
            continue
        came, room = map(int, found.groups())
        sends = {r.rank: [c.message_bytes for c in _exchanged(r, "send", aborted.rank)] for r in ranks}
        sent = {rank: came if came in lengths else lengths[-1] for rank, lengths in sends.items() if lengths}
        if came not in sent.values():
            continue
        senders = [*sent] if len(sent) == 1 else []
        received = {
            r.rank: came for r in ranks for s in senders for c in _exchanged(r, "recv", s) if c.message_bytes == came
        }
        there = _room_at(_line_of_the_aborted(aborted), ranks)
        beside = {n: b for s in senders for n, b in _sent_beside(s, aborted.rank, ranks).items() if n not in received}
        said = [f"rank {n} sent {length}" for n, length in sorted(sent.items())]
        said += [f"rank {n} received {length}" for n, length in sorted(received.items())]
        said += [f"rank {n} sent {length} from that line" for n, length in sorted(beside.items())]
        said += [f"rank {n} has room for {length} at that line" for n, length in sorted(there.items())]
        opening = f"Messages and room are of different lengths: rank {aborted.rank} had room for {room} bytes, "
        lengths = {**beside, **there, aborted.rank: room, **sent, **received}
        return against_most(lengths, f"{opening}{', '.join(said)}.", "mismatch")
    return None


def _exchanged(rank: Rank, op: str, peer: int) -> list[Collective]:
    """What this rank has sent to that one, or received from it."""
    return [c for c in rank.calls if op in c.op and c.is_exchange and peer in c.ranks]


def _sent_beside(sender: int, aborted: int, ranks: Sequence[Rank]) -> dict[int, int]:
    """How many bytes each other rank has sent from the line of the sender's last message to the aborted rank, when for the first
    time they did not send as many from there, or else last; empty where they never did."""
    line = next((_exchanged(r, "send", aborted)[-1].where for r in ranks if r.rank == sender), None)
    sends = {r.rank: [c for c in r.calls if c.is_exchange and "send" in c.op] for r in ranks if r.rank != aborted}
    lengths = {n: [c.message_bytes for c in calls if same_line(c.where, line)] for n, calls in sends.items()}
    for time, sent in enumerate(zip(*lengths.values(), strict=False)):
        if len(set(sent)) > 1:
            return {n: length for n, length in zip(lengths, sent, strict=True) if time and n != sender}
    return {n: sent[-1] for n, sent in lengths.items() if sent and n != sender}


def _room_at(line: Frame | None, ranks: Sequence[Rank]) -> dict[int, int]:
    """How many bytes each rank has room for that had come to receive at that line when the job failed."""
    last = {r.rank: r.calls[-1] for r in ranks if r.calls}
    return {
        n: c.message_bytes for n, c in last.items() if c.is_exchange and "recv" in c.op and same_line(c.where, line)
    }


def _histories(ranks: Sequence[Rank]) -> dict[int, Sequence[Collective]]:
    """What each rank joined. A rank that gloo aborts leaves no record: the length of the message that was too long for it,
    and of the room that it had, tell what the others had joined by then and what it had itself, after they all agreed."""
    histories: dict[int, Sequence[Collective]] = {rank.rank: rank.collectives for rank in ranks}
    refused: dict[tuple[int, str, int], int] = {}
    for rank in ranks:
        if rank.collectives or not (found := _TOO_LONG.search(rank.stderr)):
            continue
        came, own = map(int, found.groups())
        recent = [(c, o) for o in ranks for c in _recent(o) if not c.ranks or rank.rank in c.ranks]
        if met := [(c, o) for c, o in recent if came == _message_bytes(c, len(ranks))]:
            line = _line_of_the_aborted(rank)
            # At the line where it was, rather than another; where a rank still is, rather than what it went on from.
            last, other = max(
                met,
                key=lambda each: (same_line(each[0].where, line), each[0] is each[1].collectives[-1], each[0].at_ns),
            )
            before = [c for c in other.collectives if c.at_ns < last.at_ns and (not c.ranks or rank.rank in c.ranks)]
            histories[rank.rank] = (*before, _own_of_the_aborted(rank, own, last, ranks))
            refused[last.key] = came
            # What came was sent by the root, and a record that ends before it was taken as that rank lost its peer.
            if last.op in ("broadcast", "scatter") and last.root not in (None, rank.rank, other.rank):
                sender = histories[last.root]
                histories[last.root] = sender if any(c.key == last.key for c in sender) else (*sender, last)
        elif alike := [(c, o) for c, o in recent if own == _message_bytes(c, len(ranks))]:
            # What came to it is nobody's of whom there is a record; it had room for what another rank has joined.
            last, other = alike[-1]
            histories[rank.rank] = [c for c in other.collectives if c.at_ns <= last.at_ns]
    return {
        rank: [_measured(c, len(ranks), refused[c.key]) if c.key in refused else c for c in history]
        for rank, history in histories.items()
    }


def _recent(rank: Rank) -> Sequence[Collective]:
    """The collectives of this rank to which others may not have come yet: its last two, and those before them from which it
    may have gone on alone, having sent what it had to send."""
    sent = itertools.takewhile(lambda collective: collective.op in _ONE_SENDS, reversed(rank.collectives))
    return rank.collectives[-max(2, 1 + len(list(sent))) :]


def _measured(collective: Collective, ranks: int, came: int) -> Collective:
    """The collective with how long its messages are: those that one rank had no room for must be of one length. Who receives
    what is scattered has no size in the record; it had room for what `came`."""
    own = collective.message_bytes or _message_bytes(collective, ranks)
    return replace(collective, message_bytes=own or (came if collective.op == "scatter" else 0))


def _own_of_the_aborted(rank: Rank, own: int, met: Collective, ranks: Sequence[Rank]) -> Collective:
    """What a rank had joined that had room for `own` bytes, when a message of what others joined as `met` came to it: what
    another rank joined as the same one, else what ranks have joined from its line, else something of that length."""
    line = _line_of_the_aborted(rank)
    joined = [c for other in ranks for c in reversed(other.collectives)]
    fitting = [c for c in joined if own == _message_bytes(c, len(ranks))]
    # It may have been at the end of what is cut; but not of the very thing that it had no room for.
    came = [c for c in joined if c.key == met.key and _message_bytes(c, len(ranks)) == _message_bytes(met, len(ranks))]
    at_its_end = [c for c in joined if own == _last_message_bytes(c, len(ranks))]
    fitting += [c for c in at_its_end if not all(map(c.matches, came))]
    same = [c for c in fitting if c.key == met.key]
    if alike := next(iter(same or [c for c in fitting if same_line(c.where, line)]), None):
        own_call = replace(met, op=alike.op, sizes=alike.sizes, dtypes=alike.dtypes, where=line or alike.where)
        return replace(
            own_call,
            only_if=alike.only_if,
            loops=alike.loops,
            every_turn=alike.every_turn,
            to_the_end=alike.to_the_end,
        )
    op = met.op if same_line(line, met.where) else "a collective"
    # Which loops are around that line is not known; nothing says that the rank has left those of the others.
    return replace(met, op=op, where=line, sizes=(), dtypes=(), only_if="", message_bytes=own, guessed=True)


def _line_of_the_aborted(rank: Rank) -> Frame | None:
    """The line at which gloo aborted this rank; of two threads that had both joined something, either may be the one."""
    trained = rank.training_frames
    return None if len(trained) > 1 else trained[0] if trained else _failed_line(rank)


def _message_bytes(collective: Collective, ranks: int) -> int:
    """How long a message of this collective is in a job of so many ranks, 0 where its sizes are not known: gloo cuts an
    all-reduce and a reduce into at least two segments for each rank of the group, each of 1 MiB at most, an all-to-all and a
    scatter into one, and an all-gather's part into two (gloo/allreduce.cc, gloo/reduce.cc, gloo/alltoall.cc, gloo/scatter.cc,
    gloo/allgather.cc)."""
    item, total = _item_bytes(collective), _total_bytes(collective)
    if collective.op == "all_gather":
        # The one that is cut in bytes.
        return total // 2
    n = len(collective.ranks) or ranks
    segments = n * max(2, math.ceil(total / _SEGMENT_BYTES / n))
    cut = {"all_to_all": n, "scatter": n, "all_reduce": segments, "reduce": segments}.get(collective.op, 1)
    return math.ceil(total / cut / item) * item if total else 0


def _last_message_bytes(collective: Collective, ranks: int) -> int:
    """How long the last message of this collective is, in which what is left is sent; 0 where it is as long as the others."""
    usual = _message_bytes(collective, ranks)
    return _total_bytes(collective) % usual if usual else 0


def _total_bytes(collective: Collective) -> int:
    # A coalesced all-reduce is one of all its tensors.
    counted = collective.sizes if collective.op == "all_reduce" else collective.sizes[:1]
    return _item_bytes(collective) * sum(map(math.prod, counted))


def _item_bytes(collective: Collective) -> int:
    return max((_BYTES.get(dtype, 0) for dtype in collective.dtypes), default=0)


def _line_that_all_reached(lines: Mapping[int, Frame], ranks: Sequence[Rank]) -> Frame | None:
    """The line at which gloo aborted a rank, where every other rank was there too or had gone on from a collective there."""
    for aborted in (r for r in ranks if not r.collectives and r.rank in lines):
        line, others = lines[aborted.rank], [r for r in ranks if r is not aborted]
        if others and all(
            same_line(lines.get(r.rank), line) or any(same_line(c.where, line) for c in r.collectives[-2:])
            for r in others
        ):
            return line
    return None


def _parameter_counts(ranks: Sequence[Rank]) -> dict[int, int]:
    """How many parameters the model has, by rank, where DDP's constructor found that they differ."""
    said = [found for r in ranks if r.failure and (found := _COUNTS.search(r.failure.message))]
    return {int(rank): int(count) for found in said for rank, count in (found.group(1, 2), found.group(3, 4))}


def _by_parameter_count(counts: Mapping[int, int], ranks: Sequence[Rank]) -> Finding:
    """The ranks whose model has another number of parameters than most have."""
    said = "; ".join(f"rank {rank} has {count} parameters" for rank, count in sorted(counts.items()))
    opening = f"The ranks built different models: {said}."
    if len(counts) < len(ranks):
        return undecided(opening, "shapes_differ")
    return against_most(counts, opening, "shapes_differ")


def _against_the_first(differing: Mapping[int, tuple[str, str]], ranks: Sequence[Rank]) -> Finding:
    """DDP holds every rank's parameters against those of the first rank of its group, and says of which one the shape differs,
    and what it is there: the odd ones are those who are not with the most, if most agree."""
    last = next((r.collectives[-1] for r in ranks if r.rank in differing and r.collectives), None)
    group = (last and last.ranks) or tuple(r.rank for r in ranks)
    said = "; ".join(
        f"params[{index}] has {shape} on rank {rank}" for rank, (index, shape) in sorted(differing.items())
    )
    opening = f"The ranks built different models, and not all are as on rank {group[0]}: {said}."
    return against_most({rank: differing.get(rank) for rank in group}, opening, "shapes_differ", whom="most")


def _failed_line(rank: Rank) -> Frame | None:
    if rank.failure and rank.failure.where and rank.failure.where.own:
        return rank.failure.where
    return rank.at


def parted_at(parted: Parting) -> Finding:
    """The ranks joined different collectives as the same one."""
    joined = parted.joined
    first = min(joined.values(), key=lambda c: c.seq)
    with_roots = len({c.root for c in joined.values()} - {None}) > 1
    in_threads = len({c.in_thread for c in joined.values()}) > 1
    words = {
        n: c.shape_words + (_root_of(c) if with_roots else "") + (_thread_of(c) if in_threads else "")
        for n, c in joined.items()
    }
    same_words = len(set(words.values())) == 1
    said = "; ".join(
        f"rank {n} {'came to it from' if same_words else f'joined {words[n]}'}{_line_of(c, bare=same_words)}"
        for n, c in sorted(joined.items())
    )
    number = f"collective #{first.seq}"
    if parted.odd:
        if parted.loop:
            opening = f"{ranks_said(parted.odd)} {verb(parted.odd, 'has', 'have')} {_more_or_fewer(parted)}"
            return Finding(parted.odd, f"{opening}: at {number} {said}.", "ran_out")
        opening = f"{ranks_said(parted.odd)} left the common way at {number}"
        return Finding(parted.odd, f"{opening}: {said}; {parted.why}.", "mismatch")
    return undecided(f"The ranks part at {number}: {said}.", "mismatch")


def _more_or_fewer(parted: Parting) -> str:
    still_in_it = parted.loop in parted.joined[parted.odd[0]].loops
    return f"{'more' if still_in_it else 'fewer'} turns of the loop in line {parted.loop.rpartition(':')[2]} than the others"


def _root_of(collective: Collective) -> str:
    """` to rank 1`, ` from rank 0`; "" where it has no root."""
    if collective.root is None:
        return ""
    return f" {'to' if collective.op in ('reduce', 'gather') else 'from'} rank {collective.root}"


def _thread_of(collective: Collective) -> str:
    return " in a thread of its own" if collective.in_thread else ""


def _line_of(collective: Collective, bare: bool) -> str:
    if collective.where is None:
        return " a line that is not known" if bare else ""
    return f" {collective.where.text}" if bare else collective.from_line
