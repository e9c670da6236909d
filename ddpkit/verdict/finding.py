"""What a rule finds: the ranks at fault, and the facts from which `words.py` makes the sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ddpkit.runfolder.calls import Collective
from ddpkit.runfolder.ranks import Rank

from .ends import End
from .waits import Scene

Culprit = int | tuple[int, ...] | Literal["every rank"] | None


def numbers_of(ranks: Iterable[Rank]) -> tuple[int, ...]:
    """The numbers of some ranks, in order."""
    return tuple(sorted(rank.rank for rank in ranks))


@dataclass(frozen=True)
class Finding:
    """What a rule of docs/verdict.md found.

    `ranks`: the ranks at fault, () if that cannot be told; `rule`: the rule that decided; `kind`: the kind of failure, one
    of `pages.KINDS`. The facts for the sentence: `now`, where every rank was; `calls`, the calls that differ, by rank;
    `others`, ranks to mention that are not at fault; `detail`, anything else.
    """

    ranks: tuple[int, ...]
    rule: str
    kind: str
    now: Scene | None = None
    calls: Mapping[int, Collective] = field(default_factory=dict)
    others: tuple[int, ...] = ()
    detail: str = ""


@dataclass(frozen=True)
class Verdict:
    """Which rank is at fault. `culprit`: a rank, several, "every rank", or None if no rank is or it cannot be told.

    `sentence` says it ("" for a job that passed). `kind` is one of `pages.KINDS`, `rule` the rule that decided; `certain`
    is False if ranks had to be compared (question 3). By rank: `ends`, how it ended; `roles`: passed, culprit, own
    (failed by itself, but not the first), consequence or unknown; `waits`, which ranks it waits for if there is no culprit.
    """

    culprit: Culprit
    sentence: str
    kind: str
    rule: str = ""
    certain: bool = True
    ends: Mapping[int, End] = field(default_factory=dict)
    roles: Mapping[int, str] = field(default_factory=dict)
    waits: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
