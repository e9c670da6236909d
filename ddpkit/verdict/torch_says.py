"""What torch itself says about the rank at fault: a barrier names its missing ranks, DDP compares the models."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddpkit.runfolder.ranks import Rank

from .finding import Finding, numbers_of
from .waits import numbers_in, unlike

_BARRIER = re.compile(r"(?:\[Rank (\d+)\]: )?Ranks? (\d[\d, ]*) failed to pass monitoredBarrier")
_COUNTS = re.compile(r"Rank (\d+) has (\d+) params, while rank (\d+) has inconsistent (\d+) params")
_REFERENCE = re.compile(
    r"params\[(\d+)\] .*with (?:sizes|strides) (\[[\d, ]*\]) appears not to match \w+ of the same param in process 0"
)


def named_by_a_barrier(ranks: Sequence[Rank]) -> Finding | None:
    """The ranks that monitored_barrier says were missing; it numbers them within its process group.

    Example: "Ranks 1 failed to pass monitoredBarrier" in a group of ranks 2 and 3: rank 3.
    """
    for rank in ranks:
        said = _BARRIER.search(rank.failure.message) if rank.failure else None
        if said is None or rank.failure is None:
            continue
        missing = numbers_in(said[2])
        fitting = []
        for group in dict.fromkeys([*rank.made.groups, numbers_of(ranks)]):
            place = group.index(rank.rank) if rank.rank in group else -1
            if max(missing) < len(group) and said[1] in (None, str(place)):
                fitting.append(group)
        if fitting:
            named = tuple(sorted(map(fitting[-1].__getitem__, missing)))
            return Finding(named, "monitored barrier", "never_joined", others=(rank.rank,))
    return None


def models_differ(ranks: Sequence[Rank]) -> Finding | None:
    """The ranks whose model differs from that of most, where DDP's constructor says that models differ.

    Example: "Rank 1 has 6 params, while rank 0 has inconsistent 4 params": with two ranks, it cannot be told.
    """
    counts, shapes = {}, {}
    group: tuple[int, ...] = ()
    for rank in ranks:
        message = rank.failure.message if rank.failure else ""
        said, differs = _COUNTS.search(message), _REFERENCE.search(message)
        if said or differs:
            group = (rank.collectives[-1].ranks if rank.collectives else ()) or numbers_of(ranks)
        if said:
            counts[_in_group(said[1], group)] = f"{said[2]} parameters"
            counts[_in_group(said[3], group)] = f"{said[4]} parameters"
        if differs:
            shapes[rank.rank] = f"params[{differs[1]}] of {differs[2]}"
    if not counts and not shapes:
        return None
    odd: tuple[int, ...] = ()
    if shapes:
        odd = unlike({number: shapes.get(number, "") for number in group})
    elif len(counts) == len(group):
        odd = unlike(counts)
    has = [f"rank {number} has {words}" for number, words in sorted((counts or shapes).items())]
    return Finding(odd, "models differ", "shapes_differ", detail="; ".join(has))


def _in_group(place: str, group: tuple[int, ...]) -> int:
    """The global rank for a rank number within a process group."""
    return group[int(place)] if int(place) < len(group) else int(place)
