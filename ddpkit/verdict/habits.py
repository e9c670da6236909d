"""Which rank broke its own order of calls, or the order of all ranks. Question 3 of docs/verdict.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ddpkit.runfolder.calls import Collective

from .finding import Finding
from .waits import Scene, kind_of_odd, minority

_LONGEST_HABIT = 24
# After this many messages, each rank's part in the exchange is known.
_ROLES_SHOW_AFTER = 2


def by_next_call(now: Scene, inside: set[int]) -> Finding | None:
    """The ranks whose next call differs from that of most, where all had made the same calls before.

    Peers count from each rank: a send to the next rank is the same call for all. Example: in a ring, ranks 0 and 1
    receive from the rank before them, rank 2 sends once more: rank 2.
    """
    ways = {}
    for number, calls in now.calls.items():
        if not calls or calls[0].seq != 1:
            return None
        if now.at[number].kind != "left" or number in inside:
            ways[number] = [_seen_from(number, call, now.size) for call in calls]
    if len(ways) < 3:
        return None
    exchanges = 0
    for turn, made in enumerate(zip(*ways.values(), strict=False)):
        usual, votes = Counter(made).most_common(1)[0]
        if votes < len(made):
            odd = minority(dict(zip(ways, made, strict=True)))
            if not odd or not turn or not _is_sure(usual, made, exchanges):
                return None
            next_calls = {number: now.calls[number][turn] for number in ways}
            return Finding(odd, "next call", kind_of_odd(now, set(odd)), now, next_calls)
        exchanges += isinstance(usual[2], tuple)
    return None


def _seen_from(number: int, call: Collective, size: int) -> tuple[Any, ...]:
    """A call as its rank sees it: operation, line, and the distance to its peer or the size of its group."""
    line = call.where and call.where.line
    if call.is_exchange:
        distances = [(peer - number) % size for peer in call.ranks]
        return call.op, line, (*distances, call.tag)
    return call.op, line, call.group if len(call.ranks) == size else len(call.ranks)


def _is_sure(usual: tuple[Any, ...], made: Sequence[tuple[Any, ...]], exchanges: int) -> bool:
    """Whether the next calls can be compared: in the first messages, some ranks send and some receive by design.

    Example: after one message, most ranks send to the next rank, at line 9. If rank 2 receives there, that may be its
    role: no. If rank 2 sends at line 9 too, but to another rank: yes.
    """
    if not isinstance(usual[2], tuple) or exchanges > _ROLES_SHOW_AFTER:
        return True
    return exchanges > 0 and any(call != usual and call[:2] == usual[:2] for call in made)


def by_habit(now: Scene, inside: set[int]) -> Finding | None:
    """The only rank whose next call differs from what it has always called here.

    Example: rank 1 has always gone from backward to barrier; now it is in all_gather, and rank 0 waits in barrier.
    """
    calls, with_keys = {}, {}
    for number, place in now.at.items():
        if place.kind != "left":
            calls[number] = now.calls[number]
            with_keys[number] = sorted([*now.calls[number], *place.rank.made.keyed], key=lambda call: call.at_ns)
    for ways in (calls, with_keys):
        found = _only_one_to_leave_a_habit(ways, inside)
        if found is not None:
            number, turn = found
            before_and_now = dict(enumerate(ways[number][turn - 1 : turn + 1]))
            return Finding((number,), "habit", kind_of_odd(now, {number}), now, before_and_now)
    return None


def _only_one_to_leave_a_habit(ways: Mapping[int, Sequence[Collective]], inside: set[int]) -> tuple[int, int] | None:
    """The only rank that left its habit, and at which of its calls.

    If several ranks leave a habit after the same number of calls, the habit has ended, like a loop. With only two ranks,
    a departure counts only if the new call is one that some rank had made before.
    """
    turns: Counter[object] = Counter()
    left, known = [], set()
    for number, calls in ways.items():
        made = [call.call for call in calls]
        known |= set(made[:-1])
        for i in _breaks_of_habit(calls):
            turn = made[i - 1], made[:i].count(made[i - 1])
            turns[turn] += 1
            left.append((number, i, turn))
    odd = {}
    for number, i, turn in left:
        if turns[turn] == 1 and (len(ways) > 2 or ways[number][i].call in known):
            odd[number] = i
    if len(ways) < 2 or len(odd) != 1 or not set(odd) <= inside:
        return None
    return odd.popitem()


def _breaks_of_habit(calls: Sequence[Collective]) -> list[int]:
    """The indexes where a rank departed from what it always did after the same calls, and did so only once."""
    steps = _steps(calls)
    found = []
    for i in range(2, len(steps)):
        length = _habit_broken_at(steps, i)
        if length and not _comes_again(steps, i, length):
            found.append(i)
    return found


Step = tuple[object, str, int, tuple[int, ...]]


def _steps(calls: Sequence[Collective]) -> list[Step]:
    """Each call as a step: operation and line, group, how much its tag grew, and its peer.

    Example: sends to rank 1 with tags 5, 6 and 7 are steps of one kind, as each tag is one more than the last.
    """
    steps: list[Step] = []
    last: dict[object, int] = {}
    for call in calls:
        row = (call.op.lstrip("i"), call.ranks)
        moved = call.tag - last.get(row, call.tag - 1 if call.tag else 0)
        last[row] = call.tag
        steps.append((call.call, call.group, moved, call.ranks if call.is_exchange else ()))
    return steps


def _habit_broken_at(steps: Sequence[Step], i: int) -> int:
    """The length of the habit that the i-th call broke; 0 if it broke none.

    The habit is the longest run of calls just before it that had occurred twice or more, never with this call after it.
    """
    for length in range(min(_LONGEST_HABIT, i), 0, -1):
        after = []
        for j in range(length, i):
            if steps[j - length : j] == steps[i - length : i]:
                after.append(steps[j])
        if len(after) > 1:
            return 0 if steps[i] in after else length
    return 0


def _comes_again(steps: Sequence[Step], i: int, length: int) -> bool:
    return any(steps[j - length : j + 1] == steps[i - length : i + 1] for j in range(i + 1, len(steps)))
