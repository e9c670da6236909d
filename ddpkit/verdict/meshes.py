"""Says who has taken another process group than the others, or its groups in another order: as in a mesh of rows and columns."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ddpkit.runfolder.calls import Collective, in_time
from ddpkit.runfolder.frames import Frame

from .finding import Odd, ranks_said

# What a rank did more often than this at a point of the program is what it does there.
HABIT_FROM = 3

Histories = Mapping[int, Sequence[Collective]]


def across_the_groups(histories: Histories) -> Odd | None:
    """The one rank that came to a line in a process group that cuts across those in which the others come to it, where these
    have no rank in common: as in a mesh, where one takes a group of its row for one of its column."""
    by_line: dict[Frame, dict[int, list[Collective]]] = {}
    for number, history in histories.items():
        for call in history:
            if call.where is not None:
                by_line.setdefault(call.where, {}).setdefault(number, []).append(call)
    for there in by_line.values():
        last = {n: frozenset(calls[-1].ranks or histories) for n, calls in there.items()}
        beside = {n: _groups_of_the_others(n, there, last) for n in there}
        across = [n for n, groups in beside.items() if n in set().union(*groups) and _cuts(last[n], groups)]
        if len(across) == 1:
            call = there[across[0]][-1]
            group = ranks_said(sorted(last[across[0]])).lower()
            others = "the others come there in groups that have no rank in common"
            return (across[0],), f"it joined {call.op}{call.from_line} in the group of {group}; {others}"
    return None


def against_its_order(histories: Histories) -> Odd | None:
    """The one rank that came from a group's collective to another group's as it never had, where it had always gone on to one
    other, four times or more, while each of the others took its last step as it had before."""
    steps = {n: [*itertools.pairwise(in_time(history))] for n, history in histories.items()}
    last = {n: made[-1] for n, made in steps.items() if made}
    before = {n: [_way(step) for step in made[:-1]] for n, made in steps.items()}
    new = [n for n, step in last.items() if _way(step) not in before[n]]
    if len(new) != 1 or len(last) < len(histories):
        return None
    (number,) = new
    came_from, to = last[number]
    usual = [after for way, after in before[number] if way == (came_from.call, came_from.group)]
    if len(usual) <= HABIT_FROM or len({*usual}) != 1 or usual[0][0] != to.call:
        return None
    way = f"after {came_from.name} it came to {to.name}{to.from_line}"
    return (number,), f"{way}, and had always come to group {usual[0][1]}"


def _way(step: tuple[Collective, Collective]) -> tuple[tuple[object, ...], tuple[object, ...]]:
    before, after = step
    return (before.call, before.group), (after.call, after.group)


def _groups_of_the_others(
    number: int, there: Mapping[int, Sequence[Collective]], last: Mapping[int, frozenset[int]]
) -> set[frozenset[int]]:
    """The groups in which all ranks but `number` came to a line; empty if these are fewer than three, if one of them came to
    it in several groups, or if two of the groups have a rank in common."""
    others = [n for n in there if n != number]
    groups = {last[n] for n in others}
    one_each = all(frozenset(c.ranks or last[n]) == last[n] for n in others for c in there[n])
    apart = all(not one & other for one, other in itertools.combinations(groups, 2))
    return groups if len(others) > 2 and one_each and apart else set()


def _cuts(group: frozenset[int], others: set[frozenset[int]]) -> bool:
    return any(group & other and group != other for other in others)
