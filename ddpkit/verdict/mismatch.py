"""Says which rank met the others in another collective, or with other sizes, where gloo or torch says that one did."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from ddpkit.runfolder.calls import Collective
from ddpkit.runfolder.frames import Frame
from ddpkit.runfolder.ranks import Rank

from .finding import Finding, against_most, ranks_said, undecided, verb
from .parting import Parting, parting
from .standing import same_line, standing

_COUNTS = re.compile(r"Rank (\d+) has (\d+) params, while rank (\d+) has inconsistent (\d+) params")
_TOO_LONG = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_REFERENCE = re.compile(
    r"params\[(\d+)\] .*with (?:sizes|strides) (\[[\d, ]*\]) appears not to match \w+ of the same param in process 0"
)


def find_parting(ranks: Sequence[Rank]) -> Finding:
    """Who met others in another collective, where gloo or torch has said that somebody did.

    Where neither collectives nor sizes say it, the lines at which the ranks were must tell.
    """
    if parted := parting({rank.rank: rank.collectives for rank in ranks}):
        return parted_at(parted)
    if parted := _of_another_size(ranks):
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


def _of_another_size(ranks: Sequence[Rank]) -> Parting | None:
    """Who joined with another size than most what may be joined with several, as an all-to-all, if gloo aborted a rank in it and
    all ranks had always joined it with one size before."""
    last = next((standing(r).collective for r in ranks if _TOO_LONG.search(r.stderr)), None)
    if last is None:
        return None
    calls = [(r.rank, c) for r in ranks for c in r.collectives if (c.group, c.setup) == (last.group, last.setup)]
    joined = {n: c for n, c in calls if c.seq == last.seq}
    before = {c.sizes for _n, c in calls if c.call == last.call and c.seq < last.seq}
    ((usual, times),) = Counter(c.sizes for c in joined.values()).most_common(1)
    odd = tuple(sorted(n for n, c in joined.items() if c.sizes != usual))
    told = odd and 2 * times > len(ranks) and before <= {usual}
    return Parting(joined, odd, "the other ranks agree") if told else None


def _by_length(ranks: Sequence[Rank]) -> Finding | None:
    """Who differs where gloo aborted a rank for a message that was too long for it, and another rank's send was so long: the
    lengths of what each sent to it last, or of that send, and of the room that it had. Where one rank alone has sent it
    messages, those to whom the same rank sent as long a one, and who had room for it, tell too; and so do those who wait to
    receive from others at the line of the aborted rank, and those who send to others what had been as long as its own before."""
    for aborted in ranks:
        found = _TOO_LONG.search(aborted.stderr)
        if not found:
            continue
        came, room = map(int, found.groups())
        others = [r for r in ranks if r is not aborted]
        sends = {r.rank: [c.message_bytes for c in r.exchanged_with(aborted.rank, "send")] for r in others}
        sent = {rank: came if came in lengths else lengths[-1] for rank, lengths in sends.items() if lengths}
        if came not in sent.values():
            continue
        senders = [*sent] if len(sent) == 1 else []
        received = {
            r.rank: came
            for r in others
            for s in senders
            for c in r.exchanged_with(s, "recv")
            if c.message_bytes == came
        }
        beside = {n: b for s in senders for n, b in _sent_beside(s, aborted.rank, ranks).items() if n not in received}
        line = aborted.calls[-1].where if aborted.calls else None
        there = _room_at(line, [r for r in others if r.rank not in (*sent, *beside)])
        said = [f"rank {n} sent {length}" for n, length in sorted(sent.items())]
        said += [f"rank {n} received {length}" for n, length in sorted(received.items())]
        said += [f"rank {n} sent {length} from that line" for n, length in sorted(beside.items())]
        said += [f"rank {n} has room for {length} at that line" for n, length in sorted(there.items())]
        opening = f"Messages and room are of different lengths: rank {aborted.rank} had room for {room} bytes, "
        lengths = {**beside, **there, aborted.rank: room, **sent, **received}
        return against_most(lengths, f"{opening}{', '.join(said)}.", "mismatch")
    return None


def _sent_beside(sender: int, aborted: int, ranks: Sequence[Rank]) -> dict[int, int]:
    """How many bytes each other rank has sent from the line of the sender's last message to the aborted rank, when for the first
    time they did not send as many from there, or else last; empty where they never did."""
    line = next((r.exchanged_with(aborted, "send")[-1].where for r in ranks if r.rank == sender), None)
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


def _line_that_all_reached(lines: Mapping[int, Frame], ranks: Sequence[Rank]) -> Frame | None:
    """The line at which gloo aborted a rank, where every other rank was there too or had gone on from a collective there."""
    for aborted in (r for r in ranks if _TOO_LONG.search(r.stderr) and r.rank in lines):
        line, others = lines[aborted.rank], [r for r in ranks if r is not aborted]
        if others and all(
            same_line(lines.get(r.rank), line) or any(same_line(c.where, line) for c in r.collectives[-2:])
            for r in others
        ):
            return line
    return None


def _parameter_counts(ranks: Sequence[Rank]) -> dict[int, int]:
    """How many parameters the model has, by rank, where DDP's constructor found that they differ. It counts in its group."""
    found: dict[int, int] = {}
    for rank in ranks:
        if told := _COUNTS.search(rank.failure.message if rank.failure else ""):
            group = _last_group(rank, ranks)
            for place, count in (told.group(1, 2), told.group(3, 4)):
                found[group[int(place)] if int(place) < len(group) else int(place)] = int(count)
    return found


def _by_parameter_count(counts: Mapping[int, int], ranks: Sequence[Rank]) -> Finding:
    """The ranks whose model has another number of parameters than most of the group have."""
    said = "; ".join(f"rank {rank} has {count} parameters" for rank, count in sorted(counts.items()))
    opening = f"The ranks built different models: {said}."
    group = next(_last_group(r, ranks) for r in ranks if r.rank in counts)
    if len(counts) < len(group):
        return undecided(opening, "shapes_differ")
    return against_most(counts, opening, "shapes_differ")


def _against_the_first(differing: Mapping[int, tuple[str, str]], ranks: Sequence[Rank]) -> Finding:
    """DDP holds every rank's parameters against those of the first rank of its group, and says of which one the shape differs,
    and what it is there: the odd ones are those who are not with the most, if most agree."""
    group = _last_group(next(r for r in ranks if r.rank in differing), ranks)
    said = "; ".join(
        f"params[{index}] has {shape} on rank {rank}" for rank, (index, shape) in sorted(differing.items())
    )
    opening = f"The ranks built different models, and not all are as on rank {group[0]}: {said}."
    return against_most({rank: differing.get(rank) for rank in group}, opening, "shapes_differ", whom="most")


def _last_group(rank: Rank, ranks: Sequence[Rank]) -> tuple[int, ...]:
    """The ranks of the group in which this one made its last collective; all where it made none, or that is not known."""
    return (rank.collectives[-1].ranks if rank.collectives else ()) or tuple(r.rank for r in ranks)


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
