"""Says who alone stayed in one function of the program, where all others went on to the next after the same calls."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .collectives import Collective, in_time
from .finding import Odd


@dataclass(frozen=True)
class _Stay:
    """What a rank did in one function without a call from another between: the operations, in turn, and where it went then."""

    function: str
    ops: tuple[str, ...]
    went_to: str = ""


def stayed_behind(histories: Mapping[int, Sequence[Collective]]) -> Odd | None:
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


def _stays(calls: Sequence[Collective]) -> list[_Stay]:
    runs = [
        (function, tuple(call.op for call in run))
        for function, run in itertools.groupby(in_time(calls), lambda call: call.where.function if call.where else "")
    ]
    after = [*[function for function, _ops in runs][1:], ""]
    return [_Stay(function, ops, to) for (function, ops), to in zip(runs, after, strict=False)]
