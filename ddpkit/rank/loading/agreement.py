"""What the loaders of all ranks agree on (`loader.py`): the same pass, as it begins, and how many retries an epoch has left."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

from ddpkit.rank.guarding.guard import gathered

MOST_NAMED = 8
_loaders_with_retries = itertools.count()
_UNEVEN = "those with more would wait for ever. Use DistributedSampler (as without sampler=), drop_last=True, or torch's Join."
_NOT_RESUMED = "load the same state, or set the same epoch, on every rank."
_OTHER_SEED = "samples would come twice, or not at all. Give every rank the same seed=."


class UnevenData(RuntimeError):
    """The ranks are about to go through different numbers of batches, or not through the same epoch."""


def agree(batches: int, epoch: int, batch: int, seed: int, halvings: int) -> int:
    """Compare with the other ranks how many batches the pass has, where it begins and with which seed; one all-gather.

    Returns the most that any rank has halved its workers.

    Raises:
        UnevenData: on every rank, with what each has.
    """
    rows = [row.tolist() for row in gathered(torch.tensor([batches, epoch, batch, seed, halvings], dtype=torch.int64))]
    _check_alike([f"{row[0]} batches" for row in rows], _UNEVEN)
    _check_alike([f"batch {row[2]} of epoch {row[1]} to come" for row in rows], _NOT_RESUMED)
    _check_alike([f"the seed {row[3]}" for row in rows], _OTHER_SEED)
    return int(max(row[4] for row in rows))


def _check_alike(found: list[str], cure: str) -> None:
    """Raise when `found`, in words by rank, is not the same on all."""
    if len(set(found)) == 1:
        return
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(found):
        ranks.setdefault(each, []).append(rank)
    told = ", ".join(f"{_who(who)} {each}" for each, who in ranks.items())
    raise UnevenData(f"safe_loader: {told}: {cure}")


def _who(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    named = ", ".join(map(str, ranks[:MOST_NAMED]))
    return f"ranks {named} have" if len(ranks) <= MOST_NAMED else f"{len(ranks)} ranks ({named}, ...) have"


class Retries:
    """Counts the retries of each epoch: of all ranks in `store`, by one atomic number, else of this process alone.

    No collective: the other ranks are in the middle of a step.
    """

    def __init__(self, allowed: int, store: Any) -> None:
        self._allowed = allowed
        self._taken: dict[int, int] = {}
        self._store = None
        if allowed and store is not None:
            # Every rank makes its loaders in the same order.
            self._store = dist.PrefixStore(f"ddpkit/loader_{next(_loaders_with_retries)}", store)

    def take(self, epoch: int) -> int:
        """Take one in `epoch`, and say how many are left; negative where none was."""
        if not self._allowed:
            return -1
        if self._store is not None:
            return self._allowed - int(self._store.add(f"epoch_{epoch}", 1))
        self._taken[epoch] = self._taken.get(epoch, 0) + 1
        return self._allowed - self._taken[epoch]
