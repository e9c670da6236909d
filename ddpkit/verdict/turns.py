"""Says who alone is out of turn: still in a function that all others left, or before them at a message that comes later."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpkit.runfolder.calls import Collective, in_time

from .finding import Odd
from .meshes import HABIT_FROM, Histories
from .standing import Standing, peers

# So many of a rank's last calls are what it did lately.
LATELY = 8


@dataclass(frozen=True)
class _Stay:
    """What a rank did in one function without a call from another between: the operations, in turn, and where it went then."""

    function: str
    ops: tuple[str, ...]
    went_to: str = ""


def stayed_behind(histories: Histories) -> Odd | None:
    """The one rank that makes further calls in a function which all others, two or more, left for one other after as many."""
    stays = {n: _stays(calls) for n, calls in histories.items()}
    for turn in zip(*stays.values(), strict=False):
        with_each = dict(zip(stays, turn, strict=True))
        still = [n for n, stay in with_each.items() if not stay.went_to]
        gone = {stay for n, stay in with_each.items() if n not in still}
        if not still:
            continue
        if len(still) > 1 or len(with_each) < 3 or len(gone) != 1:
            return None
        (usual,) = gone
        number, made = still[0], with_each[still[0]]
        further = len(made.ops) > len(usual.ops) > 1
        if made.function != usual.function or not further or made.ops[: len(usual.ops)] != usual.ops:
            return None
        went = f"after {len(usual.ops)} calls in {usual.function} all others went on to {usual.went_to}"
        return (number,), f"{went}, and it makes more of them"
    return None


def leaves_its_own_way(histories: Histories) -> Odd | None:
    """The one rank of three or more that lately went from one call to another as it never had, though it had made both often,
    where no other rank did anything new lately."""
    turns = {n: in_time(calls) for n, calls in histories.items()}
    new = {n: at for n, calls in turns.items() if (at := _new_step(calls))}
    if len(new) != 1 or len(histories) < 3:
        return None
    ((number, at),) = new.items()
    before, after = turns[number][at - 1], turns[number][at]
    often = [
        [*map(_with_whom, turns[number][: at - 1])].count(_with_whom(call)) > HABIT_FROM for call in (before, after)
    ]
    if not all(often):
        return None
    way = f"after {before.name}{before.from_line} it came to {after.name}{after.from_line}"
    return (number,), f"{way}, as it never had, and no other rank did anything new"


def _new_step(calls: Sequence[Collective]) -> int:
    """The place of the first of its last few calls to which a rank had not come from the call before; 0 where there is none."""
    ways = list(itertools.pairwise(map(_with_whom, calls)))
    return next((at + 1 for at in range(max(0, len(ways) - LATELY), len(ways)) if ways[at] not in ways[:at]), 0)


def _with_whom(call: Collective) -> tuple[object, ...]:
    return (*call.call, call.group, call.ranks)


def asks_too_soon(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> Odd | None:
    """The one rank that waits to receive of another, which is with all others, two or more, in a collective, and whose function
    has a send below that."""
    exchanging = {n: s for n, s in waiting.items() if s.pairwise}
    joined = {s.collective.key: s.collective for s in waiting.values() if s.collective}
    if len(exchanging) != 1 or len(joined) != 1 or not len(waiting) == len(at) > 2:
        return None
    ((number, asking),), (there,) = exchanging.items(), joined.values()
    asked, calls = peers(asking), asking.rank.calls
    look = at[asked[0]].rank.look if len(asked) == 1 and asked[0] in at else None
    receives = bool(calls) and "recv" in calls[-1].op and {*there.ranks} == {*at}
    if not receives or look is None or {"send", "isend"}.isdisjoint(look.ahead):
        return None
    return (number,), f"it waits for a message that rank {asked[0]} sends only after {there.name}{there.from_line}"


def _stays(calls: Sequence[Collective]) -> list[_Stay]:
    runs = [
        (function, tuple(call.op for call in run))
        for function, run in itertools.groupby(in_time(calls), lambda call: call.where.function if call.where else "")
    ]
    after = [*[function for function, _ops in runs][1:], ""]
    return [_Stay(function, ops, to) for (function, ops), to in zip(runs, after, strict=False)]
