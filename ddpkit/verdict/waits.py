"""Which rank waits for which, as a graph at one moment. Question 2 of docs/verdict.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ddpkit.runfolder.calls import Collective, Together, first_split
from ddpkit.runfolder.program import Program
from ddpkit.runfolder.ranks import Rank

from .ends import End, failed_at, own_end, returned_alone
from .places import Kind, Place, awaits, makes_a_store, peers, place_of

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Scene:
    """Where every rank is, and the calls it had made: at `at_ns`, the first wait given up, or when nothing moved (None)."""

    at: dict[int, Place]
    calls: dict[int, list[Collective]]
    at_ns: int | None = None

    @cached_property
    def program(self) -> Program:
        """The source of what the ranks ran."""
        first = next(iter(self.at.values()))
        return Program(first.rank.sources)

    def loops(self, call: Collective) -> list[str]:
        """The loops around a call, the innermost first."""
        return self.program.loops(call.path)

    def in_an_earlier_turn(self, late: Place, call: Collective) -> bool:
        """Whether a rank is in a loop that makes that call in every turn."""
        around = self.program.loops(late.rank.path)
        return not set(around).isdisjoint(self.program.every_turn(call.path))

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.at)

    @cached_property
    def split(self) -> Together:
        """The first place where ranks joined different collectives under one number; empty if there is none."""
        return first_split(self.calls)

    @cached_property
    def waits(self) -> dict[int, set[int]]:
        """The arrows: for each rank, the ranks that it waits for."""
        return {number: waits_for(place, self) for number, place in self.at.items()}

    @property
    def waiting(self) -> dict[int, Place]:
        """The ranks that wait for others, with their places."""
        return {number: self.at[number] for number in sorted(self.of_kind("waiting", "joining"))}

    def of_kind(self, *kinds: Kind) -> set[int]:
        """The ranks whose place is of one of these kinds."""
        return {number for number, place in self.at.items() if place.kind in kinds}

    def missing(self, place: Place) -> list[int]:
        """The ranks that have not joined the collective in which a rank waits; of a send or receive, its peers."""
        call = place.collective
        if place.pairwise or call is None:
            return sorted(self.at.keys() & set(peers(place)))
        found = []
        for number in sorted(self.at.keys() & set(call.ranks or self.at) - {place.rank.rank}):
            # A rank may have joined a later one of the process group.
            if not any(own.key[:2] == call.key[:2] and own.seq >= call.seq for own in self.calls[number]):
                found.append(number)
        return found


def scene(ranks: Sequence[Rank], at_ns: int | None = None) -> Scene:
    """Where the ranks were at that moment, or as they were found when nothing moved."""
    calls = {rank.rank: [call for call in rank.calls if not at_ns or call.at_ns <= at_ns] for rank in ranks}
    now = Scene({rank.rank: place_of(rank, at_ns) for rank in ranks}, calls, at_ns)
    for number, place in now.at.items():
        now.at[number] = _in_a_wait(place, now)
    return now


def _in_a_wait(place: Place, now: Scene) -> Place:
    """The same place; a wait, if the rank was in a call that needed other ranks."""
    if now.at_ns:
        for call in place.rank.collectives:
            if call.at_ns <= now.at_ns <= call.over_ns:
                return replace(place, kind="waiting", line=call.where, collective=call, pairwise=False)
    if place.kind == "idle" and makes_a_store(place):
        return replace(place, kind="joining")
    if place.kind == "idle" and place.collective and now.missing(place):
        return replace(place, kind="waiting")
    return _in_what_it_had_begun(place, now)


def _in_what_it_had_begun(place: Place, now: Scene) -> Place:
    """The same place, in the first collective that others have not joined, for a rank that gave it up.

    The rank's record says that this collective is done: it began at an earlier line, or its error was caught. Example:
    rank 0 calls all_reduce #4 with async_op=True and gives up at `work.wait()`; rank 1 never joined #4: rank 0 is in #4.
    """
    rank = place.rank
    if place.collective or place.pairwise or place.kind != "waiting" or rank.failure is None:
        return place
    begun: Sequence[Collective] = ()
    if awaits(place):
        begun = rank.collectives
    elif rank.failure.chain and rank.collectives[-1:] == rank.calls[-1:] and own_end(rank) in ("gave_up", "peer_lost"):
        begun = rank.collectives[-1:]
    for call in begun:
        found = replace(place, collective=call)
        if now.missing(found):
            return found
    return place


def first_given_up(ranks: Sequence[Rank], ends: Mapping[int, End]) -> int | None:
    """When the first wait was given up; None if no wait was.

    Example: rank 0 gave up all_reduce #4 after 2 s and left; rank 1 came to it after 4 s: draw the arrows as of 2 s.
    """
    moments = []
    for rank in ranks:
        loss = returned_alone(rank, ranks)
        if loss and loss[0] == "gave_up":
            moments.append(loss[1])
        elif ends[rank.rank] == "gave_up":
            moments.append(failed_at(rank))
    return min(moments, default=None)


def waits_for(place: Place, now: Scene) -> set[int]:
    """The ranks that one rank waits for: group members, its peer, the setter of a key, or the holder of a lock."""
    look, everybody = place.rank.look, set(now.at)
    if look and look.locked_by in now.at:
        return {look.locked_by}
    if place.kind == "joining":
        return everybody - now.of_kind("joining")
    if place.kind != "waiting":
        return set()
    if place.rank.awaited:
        return setters(place, now)
    if place.collective is None and not place.pairwise:
        return everybody - now.of_kind("waiting")
    if place.pairwise and not peers(place):
        return everybody - {place.rank.rank}
    return set(now.missing(place)) - {place.rank.rank}


def setters(place: Place, now: Scene) -> set[int]:
    """The ranks that must set the keys a rank waits for; if the keys do not tell, the ranks that wait for no key.

    Example: ranks 0 and 2 wait for "unpacked", and no rank has set a similar key; rank 1 is in a barrier: rank 1.
    """
    found = owners(place, now)
    if found:
        return found
    at_keys, same = set(), set()
    for number, other in now.at.items():
        if other.rank.awaited:
            at_keys.add(number)
        if other.rank.awaited == place.rank.awaited:
            same.add(number)
    # If all ranks wait for keys, the setters are the ranks that wait for a different one.
    camp = same if len(at_keys) == now.size else at_keys
    return set(now.at) - camp if 2 * len(camp) >= now.size else set()


def owners(place: Place, now: Scene) -> set[int]:
    """The other ranks that own the keys a rank waits for, as far as the keys tell."""
    already: set[str] = set()
    for other in now.at.values():
        already |= set(other.rank.made.keys_set)
    found = set()
    for key in place.rank.awaited:
        if key not in already:
            found |= owner_of(key, now)
    return found - {place.rank.rank}


def owner_of(key: str, now: Scene) -> set[int]:
    """The rank whose number is in a key, as in similar keys; or the only rank that has set similar keys.

    Example: rank 0 set "done/0/2" and rank 1 set "done/1/2"; the key "done/1/3" belongs to rank 1.
    """
    like = []
    for number, place in now.at.items():
        for other in place.rank.made.keys_set:
            if _NUMBER.sub("#", other) == _NUMBER.sub("#", key):
                like.append((number, numbers_in(other)))
    known = {number for number, _ in like}
    if len(known) < 2:
        return known
    for position, mentioned in enumerate(numbers_in(key)):
        if all(numbers[position] % now.size == number for number, numbers in like):
            return {mentioned % now.size}
    return set()


def numbers_in(text: str) -> list[int]:
    """The numbers in a text, in order."""
    return [int(digits) for digits in _NUMBER.findall(text)]


def sinks(now: Scene) -> list[int]:
    """The ranks that others wait for and that wait for nobody themselves.

    Example: rank 0 waits in barrier #9 for rank 1, which is in queue.get(): rank 1.
    """
    held: set[int] = set()
    for others in now.waits.values():
        held |= others
    free, last = [], []
    for number in sorted(held):
        place = now.at[number]
        known = place.kind != "unknown" or bool(place.rank.collectives)
        if now.waits[number] or not known:
            continue
        last.append(number)
        if place.kind not in ("waiting", "joining"):
            free.append(number)
    # A waiting rank that waits for no known rank also ends the waits, unless ranks joined different collectives.
    return last if not free and len(last) == 1 and not now.split else free


def circle(now: Scene) -> set[int]:
    """The ranks that are part of a circle of waits."""
    found = set()
    for number in now.waits:
        seen: set[int] = set()
        todo = set(now.waits[number])
        while todo:
            other = todo.pop()
            seen.add(other)
            todo |= now.waits.get(other, set()) - seen
        if number in seen:
            found.add(number)
    return found


def minority(by_rank: Mapping[int, Hashable]) -> tuple[int, ...]:
    """The ranks whose value differs from that of more than half; () without a majority."""
    usual, votes = Counter(by_rank.values()).most_common(1)[0] if by_rank else (None, 0)
    odd = [number for number in sorted(by_rank) if by_rank[number] != usual]
    return tuple(odd) if 2 * votes > len(by_rank) else ()


def unlike(by_rank: Mapping[int, Hashable]) -> tuple[int, ...]:
    """The ranks whose value differs from most; all ranks, if there are at least three and no two agree."""
    if len(by_rank) > 2 and len(set(by_rank.values())) == len(by_rank):
        return tuple(sorted(by_rank))
    return minority(by_rank)


def kind_of_odd(now: Scene, who: set[int]) -> str:
    """The failure's kind if one of the ranks in a circle is odd, by what the ranks wait in.

    Example: rank 1 is odd. Rank 0 waits for its key: "no_key"; for its message: "unmatched"; in a barrier that rank 1
    alone has not joined: "never_joined"; in the same call as rank 1: "mismatch".
    """
    if not who or len(who) == now.size:
        return "mismatch" if now.split else "all_waiting"
    calls, by_pairs, for_them = set(), False, False
    for place in now.waiting.values():
        if place.rank.awaited:
            return "no_key"
        calls.add(place.collective.call if place.collective else None)
        by_pairs = by_pairs or place.pairwise
        for_them = for_them or (place.collective is not None and now.waits[place.rank.rank] == who)
    if len(calls) == 1 and None not in calls:
        return "mismatch"
    return "unmatched" if by_pairs else "never_joined" if for_them else "mismatch"
