"""What the evidence says about who is at fault: the ranks, a sentence, and a kind; and the words for several ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Which ranks left the common way, and how.
Odd = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class Finding:
    """Who holds the job up: ranks, empty where the evidence does not say. `kind` is one of the verdict's kinds."""

    ranks: tuple[int, ...]
    sentence: str
    kind: str


def undecided(opening: str, kind: str) -> Finding:
    """Ranks are at odds, and nothing says which of them is right."""
    return Finding((), f"{opening} Which of them is wrong cannot be told from this.", kind)


def against_most(by_rank: Mapping[int, object], opening: str, kind: str, whom: str = "the others") -> Finding:
    """The ranks that have something else than most have; undecided where no one thing is had by most, but all of three ranks or
    more where no two have the same."""
    (usual, most), *rest = Counter(by_rank.values()).most_common()
    if most == 1 and len(by_rank) > 2:
        return Finding(tuple(sorted(by_rank)), f"{opening} No two of the ranks agree.", kind)
    if rest and rest[0][1] == most:
        return undecided(opening, kind)
    odd = tuple(sorted(rank for rank, has in by_rank.items() if has != usual))
    return Finding(odd, f"{opening} {ranks_said(odd)} {verb(odd, 'differs', 'differ')} from {whom}.", kind)


def ranks_said(numbers: Sequence[int]) -> str:
    """`Rank 1`, or `Ranks 0, 1 and 3`."""
    if len(numbers) == 1:
        return f"Rank {numbers[0]}"
    return "Ranks " + ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"


def verb(who: Sequence[object] | Mapping[int, object], one: str, more: str) -> str:
    """`one` where it is one rank, else `more`."""
    return one if len(who) == 1 else more
