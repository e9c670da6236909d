"""Which of the ranks that failed by themselves failed first, or made the others fail. Question 1 of docs/verdict.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ddpkit.runfolder.ranks import Rank

from .ends import failed_at, sent_by
from .finding import Finding, numbers_of
from .odd_one_out import odd_one
from .waits import minority, scene

_TIE_NS = 1_000_000
_CLOSED = {"EOFError", "BrokenPipeError", "ConnectionResetError", "ConnectionRefusedError"}
# For each reduction, which of 0 and 1 decides the result on all ranks.
_DECIDES = {"SUM": 1, "MAX": 1, "MIN": 0, "PRODUCT": 0}


def by_own_failure(own: Sequence[Rank], ranks: Sequence[Rank]) -> Finding:
    """The earliest own failure; if all own failures are alike, all of their ranks.

    Example: rank 1 raises ValueError, rank 0 loses its connection to it: rank 1.
    """
    first, *later = sorted(own, key=failed_at)
    sender = sent_by(first, first.signal, ranks) if first.signal else None
    if sender:
        return Finding(tuple(sorted((sender[0], first.rank))), "signal", "sent_a_signal")
    found = _by_a_thread(own, ranks)
    if found:
        return found
    if later and len(set(map(_likeness, own))) == 1:
        found = _made_all_fail(own, ranks) if len(own) == len(ranks) else None
        return found or Finding(numbers_of(own), "alike", "own")
    released_others = first.failure is not None and first.failure.released_others
    if later and failed_at(later[0]) - failed_at(first) < _TIE_NS and not released_others:
        return Finding((), "tie", "tie", others=numbers_of([first, later[0]]))
    kind = "too_early" if first.failure and first.failure.came_later else "own"
    return Finding((first.rank,), "first", kind, others=numbers_of(later[:1]))


def _by_a_thread(own: Sequence[Rank], ranks: Sequence[Rank]) -> Finding | None:
    """The only rank whose thread died with an exception, where the failures are closed pipes or sockets."""
    dead = [rank for rank in ranks if rank.thread_died_of]
    if len(dead) != 1 or not set(map(_type, own)) <= _CLOSED:
        return None
    said = f"{dead[0].thread_died_of}, in a thread"
    return Finding((dead[0].rank,), "exception", "thread_died", scene(ranks), detail=said)


def _type(rank: Rank) -> object:
    return rank.failure.type if rank.failure else rank.exitcode


def _likeness(rank: Rank) -> object:
    where = rank.failure.where if rank.failure else None
    return _type(rank), where and (where.file, where.line)


def _made_all_fail(own: Sequence[Rank], ranks: Sequence[Rank]) -> Finding | None:
    """Where every rank failed alike: the ranks that had joined another collective or brought another number."""
    now = scene(ranks)
    if now.split:
        found = odd_one(now, everyone=True)
        if 0 < len(found.ranks) < len(ranks):
            return found
    return _by_nan(own, ranks) or _by_numbers(ranks)


def _by_nan(own: Sequence[Rank], ranks: Sequence[Rank]) -> Finding | None:
    """The ranks that had nan in a variable where the others had a number.

    Example: both raise FloatingPointError; rank 1 has nan in `loss`, rank 0 has 0.3 there: rank 1.
    """
    held = {rank.rank: set(rank.failure.nan_in if rank.failure else ()) for rank in own}
    everywhere = set.intersection(*held.values())
    alone, names = [], set[str]()
    for number in sorted(held):
        if held[number] - everywhere:
            alone.append(number)
            names |= held[number] - everywhere
    if not 0 < len(alone) < len(ranks):
        return None
    return Finding(tuple(alone), "numbers", "not_finite", detail="`" + "`, `".join(sorted(names)) + "`")


def _by_numbers(ranks: Sequence[Rank]) -> Finding | None:
    """The ranks whose number was different, or not finite, in the last collective that all ranks joined.

    Example: both ranks raise after all_reduce #6, to which rank 0 brought 0 and rank 1 brought 1: rank 1.
    """
    last, brings, keys = {}, dict[int, float](), set()
    for rank in ranks:
        called = [call for call in rank.collectives if call.op != "barrier"]
        if not called or called[-1].brings is None:
            return None
        last[rank.rank], brings[rank.rank] = called[-1], called[-1].brings
        keys.add(called[-1].key)
    nan = tuple(number for number in sorted(brings) if not math.isfinite(brings[number]))
    if len(keys) > 1 or len(nan) == len(ranks):
        return None
    if nan:
        return Finding(nan, "numbers", "not_finite", calls=last)
    odd = minority(brings) or _set_the_flag(brings, last[ranks[0].rank].reduces)
    return Finding(odd, "numbers", "own", calls=last) if odd else None


def _set_the_flag(brings: Mapping[int, float], reduces: str) -> tuple[int, ...]:
    """The ranks whose flag decided the result on all ranks; () if there is no flag, or all ranks had set it."""
    if reduces not in _DECIDES or not set(brings.values()) <= {0, 1}:
        return ()
    decided = []
    for number, value in sorted(brings.items()):
        if bool(value) == bool(_DECIDES[reduces]):
            decided.append(number)
    return tuple(decided) if len(decided) < len(brings) else ()
