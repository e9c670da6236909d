"""Says which ranks in a sentence: `rank 3`, `ranks 1, 2`, `gloo (rank 0), nccl (ranks 1, 2)`."""

from __future__ import annotations

from collections.abc import Sequence

# Of more ranks than this, a sentence names the first.
MOST_NAMED = 8


def in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 1, 2` or `ranks 0, 1, 2, 3, 4, 5, 6, 7 and 5 more`."""
    named = ", ".join(map(str, ranks[:MOST_NAMED]))
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


def by_value(values: Sequence[str]) -> dict[str, list[int]]:
    """The ranks that have each value, from the values by rank."""
    found: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return found
