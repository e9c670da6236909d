"""What each rank's flight recorder wrote down, as plain data, and where the ranks of a job part ways."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import wire
from .frames import Frame

# What the ranks did more often than this at a point of the program is what they do there.
HABIT_FROM = 3
# Whether these may be joined with other sizes by other ranks depends on the rank's role.
SIZES_MAY_DIFFER = ("gather", "reduce_scatter", "send", "recv", "alltoall", "all_to_all")


@dataclass(frozen=True, repr=False)
class Collective:
    """One collective that a rank joined: the `seq`-th of its process group, counted from 1; or a send or receive, the `seq`-th
    of its rank, of no group and with the other rank as `ranks`.

    `ranks` are the global ranks of the group (empty where torch does not tell), `at_ns` the wall clock when this rank
    joined, `done` whether it had come back when the record was taken, `where` the user's line that it came from, `only_if`
    the `if` about the rank on the way there ("" where there is none), `loops` the loops around it, the innermost first,
    `every_turn` those of them that come to it in every turn, and `to_the_end` those of these that end only as the batches
    do that they go through. `backend` is "gloo" or "nccl", "" where that is not known.

    `message_bytes` is the length of a send or receive, and `tag` its tag. `root` is the rank from or to which a collective is;
    None where there is none, or it was not kept. `brings` is the number that this rank had for it, or the sum of those (None
    where it had too many, or it was not kept; of an "object" 1 or a text's checksum where that tells of anything, else 0),
    `reduces` what is made of the ranks' numbers: "SUM", "MAX" and so on, "" where they are only passed on.
    `raising`: it was called while an exception was on its way, in a `finally` say; `in_thread`: by a thread beside the main one.
    `over_ns`: when the call was over, for the program at least; 0 where it was not, or that was not kept.
    `setup` counts how often the group had been set up anew, by another `init_process_group`: its numbers then start again.
    """

    seq: int
    op: str
    group: str
    group_name: str
    ranks: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    at_ns: int
    done: bool
    where: Frame | None
    only_if: str = ""
    loops: tuple[str, ...] = ()
    every_turn: tuple[str, ...] = ()
    to_the_end: tuple[str, ...] = ()
    message_bytes: int = 0
    setup: int = 0
    backend: str = ""
    root: int | None = None
    brings: float | None = None
    reduces: str = ""
    raising: bool = False
    in_thread: bool = False
    over_ns: int = 0
    tag: int = 0

    def __repr__(self) -> str:
        return f"{'done' if self.done else 'waiting'} in {self.name}{self.from_line}"

    @property
    def is_exchange(self) -> bool:
        """Whether it is a send or receive, which no process group counts."""
        return not self.group

    @property
    def name(self) -> str:
        """`all_reduce #9`, with the group's name where it is not the default one; `send with rank 2`."""
        if self.is_exchange:
            return f"{self.op} with rank {self.ranks[0]}" if self.ranks else f"{self.op} with any rank"
        group = "" if self.group_name in ("default_pg", "") else f" of group {self.group}"
        anew = " after init_process_group was called again" if self.setup else ""
        return f"{self.op} #{self.seq}{group}{anew}"

    @property
    def key(self) -> tuple[int, str, int]:
        """What is the same for all ranks that join this one collective."""
        return (self.setup, self.group, self.seq)

    @property
    def from_line(self) -> str:
        """` (line 21: dist.all_reduce(x))`, or "" where the line is not known."""
        return f" ({self.where.text})" if self.where else ""

    @property
    def call(self) -> tuple[object, ...]:
        """What tells one collective call of a program from another: operation and line."""
        return (self.op, (self.where.file, self.where.line) if self.where else None)

    def matches(self, other: Collective) -> bool:
        """Whether two ranks that joined these two as the same collective agree on it."""
        if self.op != other.op:
            return False
        if None not in (self.root, other.root) and self.root != other.root:
            return False
        # NCCL gathers tensors of different sizes; gloo does not.
        alike = self.op == "scatter" or (self.backend == "gloo" and "gather" in self.op)
        may_differ = not alike and any(word in self.op for word in SIZES_MAY_DIFFER)
        return {*self.dtypes} == {*other.dtypes} and (may_differ or self.sizes == other.sizes)

    @property
    def shape_words(self) -> str:
        """`all_reduce of [1000] Float`."""
        if not self.sizes:
            return self.op
        shapes = ", ".join(str(list(size)) for size in self.sizes[:2])
        return f"{self.op} of {shapes} {'/'.join(dict.fromkeys(self.dtypes))}".rstrip()


def read_exchanges(path: Path) -> tuple[Collective, ...]:
    """The sends and receives in the record at `path`, oldest first, each as a call of this rank and its peer."""
    return _calls(path, "exchanged", "")


def read_keyed(path: Path) -> tuple[Collective, ...]:
    """The calls of a store in the record at `path`, oldest first, as of a group of its own."""
    return _calls(path, "keyed", "store")


def read_keys_set(path: Path) -> dict[str, Frame | None]:
    """The keys of a store that were set, in the record at `path`, each with the last line that set it."""
    record = wire.read_record(path) or {}
    calls = [call for call in record.get("keyed", []) if call["op"] == "set"] + record.get("set_beside", [])
    return {key: Frame(**call["where"]) if call["where"] else None for call in calls for key in call["keys"]}


def _calls(path: Path, name: str, group: str) -> tuple[Collective, ...]:
    record = wire.read_record(path) or {}
    return tuple(
        Collective(
            seq=number,
            op=entry["op"],
            group=group,
            group_name=group,
            ranks=() if entry.get("peer") is None else (entry["peer"],),
            sizes=(),
            dtypes=(),
            at_ns=entry["at_ns"],
            done=True,
            where=Frame(**entry["where"]) if entry["where"] else None,
            message_bytes=entry.get("bytes", 0),
            tag=entry.get("tag", 0),
        )
        for number, entry in enumerate(record.get(name, []), 1)
    )


def read_collectives(path: Path) -> tuple[Collective, ...]:
    """The record at `path`, oldest first; empty where there is none. Sends and receives are left out: each is a matter of
    two ranks, and counted apart."""
    record = wire.read_record(path) or {}
    last: dict[str, int] = {}
    setups: Counter[str] = Counter()
    found = []
    for entry in record.get("entries", []):
        if not entry["p2p"]:
            setups[entry["group"]] += entry["seq"] < last.get(entry["group"], 0)
            last[entry["group"]] = entry["seq"]
            found.append(_collective(entry, setups[entry["group"]]))
    return tuple(found)


def _collective(entry: Mapping[str, Any], setup: int) -> Collective:
    where = entry["where"]
    return Collective(
        setup=setup,
        seq=entry["seq"],
        op=entry["op"],
        group=entry["group"],
        group_name=entry["group_name"],
        ranks=tuple(entry["ranks"]),
        sizes=tuple(map(tuple, entry["sizes"])),
        dtypes=tuple(entry["dtypes"]),
        at_ns=entry["at_ns"],
        done=entry["done"],
        where=Frame(**where) if where else None,
        only_if=entry.get("only_if", ""),
        loops=tuple(entry.get("loops", ())),
        every_turn=tuple(entry.get("every_turn", ())),
        to_the_end=tuple(entry.get("to_the_end", ())),
        backend=entry.get("backend", ""),
        root=entry.get("root"),
        brings=entry.get("brings"),
        reduces=entry.get("reduces", ""),
        raising=entry.get("raising", False),
        in_thread=entry.get("in_thread", False),
        over_ns=entry.get("over_ns", 0),
    )


Histories = Mapping[int, Sequence[Collective]]


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
    if parted is None or not parted.odd:
        return parted
    rest = tuple(sorted(set(parted.joined) - set(parted.odd)))
    for done, inside in ((parted.odd, rest), (rest, parted.odd)):
        if loop := _loop_left(done, inside, parted.joined, histories):
            return replace(parted, loop=loop)
    return parted


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
    turns = {n: sum(c.call == turn.call and c.seq >= since for c in histories[n]) for n in joined}
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


def strayed(histories: Histories) -> tuple[int, Collective, Collective] | None:
    """The only rank that once went from one call to another as nobody else did in the whole job, nor itself at other times,
    across groups: the rank, the call before and the one it came to. None where no rank, or more than one, did so.

    Who sends comes to the first send alone. With sends and receives only a rank's last step counts, and if that of every
    other rank was one that it had made before. A first send from a line may be what its peer has not come to receive.
    """
    steps = [(rank, *pair) for rank, history in histories.items() for pair in itertools.pairwise(in_time(history))]
    made = Counter((before.call, after.call) for _rank, before, after in steps)
    left = Counter(before.call for _rank, before, _after in steps)
    left_by = Counter((rank, before.call) for rank, before, _after in steps)
    habits = {(rank, call) for (rank, call), times in left_by.items() if times > 1 and left[call] > HABIT_FROM}
    once = [(r, b, a) for r, b, a in steps if made[b.call, a.call] == 1 and (r, b.call) in habits]
    if any(after.is_exchange for _rank, _before, after in steps):
        made_by = Counter((rank, before.call, after.call) for rank, before, after in steps)
        last = {rank: (rank, before, after) for rank, before, after in steps}
        new = [rank for rank, b, a in last.values() if made_by[rank, b.call, a.call] == 1]
        once = [step for step in once if step == last[step[0]] and new == [step[0]]]
        known = {before.call for _rank, before, _after in steps}
        once = [(r, b, a) for r, b, a in once if a.call in known or not (a.is_exchange and "send" in a.op)]
    return once[0] if len(once) == 1 else None


def in_time(history: Sequence[Collective]) -> list[Collective]:
    return sorted(history, key=lambda collective: collective.at_ns)


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
