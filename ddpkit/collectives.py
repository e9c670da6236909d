"""What each rank's flight recorder wrote down, as plain data, and where the ranks of a job part ways."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import wire
from .frames import Frame

# Whether these may be joined with other sizes by other ranks depends on the rank's role.
SIZES_MAY_DIFFER = ("gather", "scatter", "send", "recv", "alltoall", "all_to_all")


@dataclass(frozen=True, repr=False)
class Collective:
    """One collective that a rank joined: the `seq`-th of its process group, counted from 1.

    `ranks` are the global ranks of the group (empty where torch does not tell), `at_ns` the wall clock when this rank
    joined, `done` whether it had come back when the record was taken, `where` the user's line that it came from.
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

    def __repr__(self) -> str:
        return f"{'done' if self.done else 'waiting'} in {self.name}{self.from_line}"

    @property
    def name(self) -> str:
        """`all_reduce #9`, with the group's name where it is not the default one."""
        group = "" if self.group_name in ("default_pg", "") else f" of group {self.group}"
        return f"{self.op} #{self.seq}{group}"

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
        return any(word in self.op for word in SIZES_MAY_DIFFER) or (self.sizes, self.dtypes) == (
            other.sizes,
            other.dtypes,
        )

    @property
    def shape_words(self) -> str:
        """`all_reduce of [1000] Float`."""
        if not self.sizes:
            return self.op
        shapes = ", ".join(str(list(size)) for size in self.sizes[:2])
        return f"{self.op} of {shapes} {'/'.join(dict.fromkeys(self.dtypes))}".rstrip()


def read_collectives(path: Path) -> tuple[Collective, ...]:
    """The record at `path`, oldest first; empty where there is none. Sends and receives are left out: each is a matter of
    two ranks, and counted apart."""
    record = wire.read_record(path) or {}
    return tuple(_collective(entry) for entry in record.get("entries", []) if not entry["p2p"])


def _collective(entry: Mapping[str, Any]) -> Collective:
    where = entry["where"]
    return Collective(
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
    )


Histories = Mapping[int, Sequence[Collective]]


@dataclass(frozen=True)
class Parting:
    """The first collective that the ranks of a group joined as different ones: rank to what it joined, and which ranks are
    the odd ones, empty where the evidence does not say. `why` says what makes them odd."""

    joined: Mapping[int, Collective]
    odd: tuple[int, ...] = ()
    why: str = ""


def mismatch(histories: Histories) -> Parting | None:
    """The first collective that the ranks joined with another operation, size or type than each other."""
    for joined in _by_number(histories):
        camps = _camps(joined)
        if len(camps) > 1:
            if len(camps[-1]) > len(camps[-2]):
                return Parting(joined, tuple(sorted(r for c in camps[:-1] for r in c)), "the other ranks agree")
            return _judged_by_habit(joined, histories)
    return None


def drift(histories: Histories) -> Parting | None:
    """Where a rank left the common way without a mismatch: operation and size agree, the lines of the program do not.

    A program may let ranks join from different lines on purpose. So only a rank counts that did what nobody had done at
    this point before, while others did as always.
    """
    for joined in _by_number(histories):
        placed = all(collective.where for collective in joined.values())
        if placed and len({collective.call for collective in joined.values()}) > 1:
            found = _judged_by_habit(joined, histories)
            return found if found.odd else None
    return None


def _by_number(histories: Histories) -> list[dict[int, Collective]]:
    """What each rank joined as the same collective, in order; only where more than one did."""
    found: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, history in histories.items():
        for collective in history:
            found.setdefault((collective.group, collective.seq), {})[rank] = collective
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
    """The odd ones are those who did what no rank had done at this point before, if others did as always."""
    usual = {rank for rank, collective in joined.items() if _is_usual(collective, joined, histories)}
    if usual and len(usual) < len(joined):
        return Parting(joined, tuple(sorted(set(joined) - usual)), "in earlier steps every rank did otherwise")
    return Parting(joined)


def _is_usual(now: Collective, joined: Mapping[int, Collective], histories: Histories) -> bool:
    """Whether any rank has made this very call after the same call before, when all still agreed."""
    followed: set[tuple[object, ...]] = set()
    last: set[object] = set()
    for rank in joined:
        calls = [c.call for c in histories[rank] if c.group == now.group and c.seq < now.seq]
        followed |= set(itertools.pairwise(calls))
        last |= set(calls[-1:])
    return any((call, now.call) in followed for call in last)
