"""Whose numbers made all ranks raise: a flag of an error, a loss that is not finite, a type that only this rank gave them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ddpkit.runfolder.calls import Collective
from ddpkit.runfolder.ranks import Rank

from .endings import LEAVES, common_deed
from .finding import Finding, ranks_said, verb
from .mismatch import parted_at
from .parting import unlike

OBJECT = "object"
_NOT_FINITE = re.compile(
    r"\bnans?\b|(\b|_)is_?(nan|inf|finite)|(not|non-?|in) ?finite|FloatingPoint|diverg", re.IGNORECASE
)
_CHOOSES = re.compile(r"\b(raise|assert)\b")
_FLAGS = {0.0, 1.0}
# Which of two flags decides the whole: of a minimum one that is not set, as of "all is well", of a maximum one that is set,
# and of objects one that tells of an error.
_DECIDES = {"MIN": 0, "PRODUCT": 0, "BAND": 0, "MAX": 1, "BOR": 1, OBJECT: 1}


def find_flag(raised: Sequence[Rank], ranks: Sequence[Rank]) -> Finding | None:
    """Who brought another number than the others to the last collective of all, or numbers of another sum or type, or sent one
    to all of them, after which others `raised` by choice, all at one line. None where nobody did, or the numbers do not say."""
    joined = _last_of_all(ranks)
    if not joined:
        return None
    parted = unlike(joined)
    odd = parted.odd if parted else _odd_by_number(joined, ranks)
    told = [rank for rank in raised if rank.rank not in odd]
    if not (odd or parted) or len({*map(_line, told)}) != 1 or not all(map(_by_choice, told)):
        return None
    if parted:
        finding = parted_at(parted)
        return replace(finding, sentence=f"{finding.sentence} After it {_who(raised, ranks)} {common_deed(raised)}.")
    kind = "own" if any(rank.rank in odd for rank in raised) else "told_by_others"
    if not math.isfinite(joined[odd[0]].brings or 0.0):
        kind = "not_finite"
    return Finding(odd, _sentence(odd, joined, raised, told), kind)


def _last_of_all(ranks: Sequence[Rank]) -> dict[int, Collective]:
    """What each rank joined as the last collective of all that passed anything on; empty where they were in different ones."""
    if len({rank.collectives[-1].key if rank.collectives else None for rank in ranks}) != 1:
        return {}
    joined = {r.rank: c for r in ranks for c in r.collectives if c.op != "barrier"}
    same = len({call.key for call in joined.values()}) == 1 and len(joined) == len(ranks)
    return joined if same else {}


def _odd_by_number(joined: Mapping[int, Collective], ranks: Sequence[Rank]) -> tuple[int, ...]:
    """Whose number tells, of those that they brought to this collective, or that was sent to all; empty where none does."""
    last = next(iter(joined.values()))
    sender = last.root if last.op == "broadcast" else None
    brings = {n: call.brings for n, call in joined.items() if call.brings is not None and sender in (None, n)}
    if len(brings) < (len(joined) if sender is None else 1):
        return ()
    if not all(map(math.isfinite, brings.values())):
        return _not_finite(brings, len(joined))
    if not _of_one(last):
        return _odd_sums(brings, last.reduces)
    before = _before(last, [rank for rank in ranks if rank.rank in brings])
    if sender is not None:
        return (sender,) if _is_new(brings[sender], before) else ()
    return _odd(brings, before, last.reduces)


def find_nan(raised: Sequence[Rank]) -> Finding | None:
    """Who alone of those that `raised` at one line over what is not finite held nan in a variable: gradients and weights are
    not finite on every rank by then. None where nobody or everybody did, or they raised over something else."""
    failures = {rank.rank: rank.failure for rank in raised if rank.failure}
    over = next(iter(failures.values()), None)
    if over is None or len({*map(_line, raised)}) != 1 or not _NOT_FINITE.search(f"{over.text} {over.line_text}"):
        return None
    everywhere = set.intersection(*(set(failure.nan_in) for failure in failures.values()))
    alone = {n: held for n, f in failures.items() if (held := [name for name in f.nan_in if name not in everywhere])}
    if not alone or len(alone) == len(failures):
        return None
    named = ", ".join(dict.fromkeys(f"`{name}`" for held in alone.values() for name in held))
    rest = [rank for rank in failures if rank not in alone]
    opening = f"{ranks_said(sorted(alone))} {verb(alone, 'has', 'have')} nan in {named}"
    others = f"{ranks_said(sorted(rest)).lower()} {verb(rest, 'has', 'have')} not"
    return Finding(tuple(sorted(alone)), f"{opening}, {others}; all {common_deed(raised)}.", "not_finite")


def _of_one(call: Collective) -> bool:
    """Whether each rank brings one number, or objects, rather than several numbers."""
    return call.reduces == OBJECT or all(math.prod(size) == 1 for size in call.sizes)


def _before(last: Collective, ranks: Sequence[Rank]) -> set[float]:
    """What these ranks have brought to the same call before."""
    # One of objects is two: their sizes, and they.
    until = last.seq - (last.reduces == OBJECT)
    same = (last.call, last.group, last.setup)
    calls = [c for rank in ranks for c in rank.collectives if (c.call, c.group, c.setup) == same]
    return {c.brings for c in calls if c.seq < until and c.brings is not None}


def _is_new(number: float, before: Collection[float]) -> bool:
    """Whether it is not what was always sent or, sent for the first time, a flag that is set."""
    return number not in before if before else number == 1


def _by_choice(rank: Rank) -> bool:
    """Whether a line of the program's own raised, or left by an exit code: not a library, nor Python."""
    failure = rank.failure
    if failure is None or failure.chain or rank.signal:
        return False
    last = failure.frames[-1] if failure.frames else None
    return failure.type in LEAVES or (last is not None and last.own and bool(_CHOOSES.search(last.source)))


def _odd(brings: Mapping[int, float], before: Collection[float], reduces: str) -> tuple[int, ...]:
    """The ranks whose number tells that something is wrong; empty where none does, or all do."""
    odd: set[int] = set()
    zero, numbers = {rank for rank, number in brings.items() if not number}, set(brings.values())
    new = {rank for rank, number in brings.items() if number not in before}
    usual, times = Counter(brings.values()).most_common(1)[0]
    if len(before) == 1 and set(before) <= _FLAGS:
        odd = new
    elif not before and reduces in _DECIDES and (numbers <= _FLAGS or (reduces == OBJECT and zero)):
        odd = zero if _DECIDES[reduces] == 0 else set(brings) - zero
    elif not before and zero and all(number % 1 == 0 for number in numbers):
        odd = min((set(brings) - zero, zero), key=len)
    elif reduces != "SUM":
        # What is summed is a loss, or how many samples there are, which may change with the last batch.
        differ = {rank for rank, number in brings.items() if number != usual}
        odd = differ if 2 * times > len(brings) else new if len(before) == 1 else set()
    return tuple(sorted(odd)) if len(odd) < len(brings) else ()


def _odd_sums(brings: Mapping[int, float], reduces: str) -> tuple[int, ...]:
    """The ranks whose numbers have another sum, where they are only passed on and those of most ranks are equal."""
    usual, times = Counter(brings.values()).most_common(1)[0]
    if reduces or not usual or 2 * times <= len(brings):
        return ()
    return tuple(sorted(rank for rank, number in brings.items() if number != usual))


def _not_finite(brings: Mapping[int, float], members: int) -> tuple[int, ...]:
    """The ranks that bring a number that is not finite, unless all `members` do."""
    found = tuple(sorted(rank for rank, number in brings.items() if not math.isfinite(number)))
    return found if len(found) < members else ()


def _sentence(
    odd: tuple[int, ...], joined: Mapping[int, Collective], raised: Sequence[Rank], told: Sequence[Rank]
) -> str:
    call, others = joined[odd[0]], [number for number in joined if number not in odd]
    own = [rank for rank in raised if rank not in told and _line(rank) != _line(told[0])]
    who, what, to = ranks_said(odd), _numbers(odd, joined), f"{call.name}{call.from_line}"
    if own:
        who = f"{ranks_said([r.rank for r in own])} {common_deed(own)}; before, {who.lower()}"
    if call.op == "broadcast":
        opening = f"{who} sent {what} to the others in {to}"
    elif call.reduces == OBJECT:
        opening = f"{who} brought {what} to {to}, unlike {ranks_said(others).lower()}"
    else:
        opening = f"{who} brought {what} to {to}, {ranks_said(others).lower()} {_numbers(others, joined)}"
    raised_alike = told if own or len(raised) < len(joined) else raised
    return f"{opening}; on that {_who(raised_alike, joined)} {common_deed(raised_alike)}."


def _who(some: Sequence[Rank], of: Collection[object]) -> str:
    return "every rank" if len(some) == len(of) else ranks_said([rank.rank for rank in some]).lower()


def _line(rank: Rank) -> str:
    return rank.failure.line_text if rank.failure else ""


def _numbers(ranks: Sequence[int], joined: Mapping[int, Collective]) -> str:
    """`1`, or `0 and 2`; of several numbers their sum, and of objects what was found in them."""
    if joined[ranks[0]].reduces == OBJECT:
        return "another text" if all(call.brings for call in joined.values()) else "word of an error"
    if _of_one(joined[ranks[0]]):
        return " and ".join(sorted({f"{joined[number].brings:g}" for number in ranks}))
    return "numbers whose sum is " + " and ".join(sorted({f"{joined[number].brings:.9g}" for number in ranks}))
