"""What the loaders of all ranks agree on (`loader.py`): where a pass begins, and how many retries an epoch has left."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from ddpkit.rank.guarding.guard import gathered
from ddpkit.rank.joining.words import by_value, in_words

_loaders_with_retries = itertools.count()
_UNEVEN = "those with more would wait for ever. Use DistributedSampler (as without sampler=), drop_last=True, or torch's Join."
_NOT_RESUMED = "load the same state, or set the same epoch, on every rank."
_OTHER_SEED = "samples would come twice, or not at all. Give every rank the same seed=."


class UnevenData(RuntimeError):
    """The ranks have different numbers of batches, or are not about to begin at the same place."""


def agree(batches: int, epoch: int, batch: int, seed: int, halvings: int) -> int:
    """Compare with the other ranks how many batches a pass has, where it begins, and its seed; one all-gather.

    Returns the most that any rank has halved its workers.
    """
    rows = [row.tolist() for row in gathered(torch.tensor([batches, epoch, batch, seed, halvings], dtype=torch.int64))]
    _check_alike([f"{row[0]} batches" for row in rows], _UNEVEN)
    _check_alike([f"batch {row[2]} of epoch {row[1]} to come" for row in rows], _NOT_RESUMED)
    _check_alike([f"the seed {row[3]}" for row in rows], _OTHER_SEED)
    return int(max(row[4] for row in rows))


def _check_alike(found: list[str], cure: str) -> None:
    """Raise if `found`, in words by rank, is not the same on all."""
    ranks = by_value(found)
    if len(ranks) > 1:
        told = ", ".join(f"{in_words(who)} {'have' if len(who) > 1 else 'has'} {each}" for each, who in ranks.items())
        raise UnevenData(f"safe_loader: {told}: {cure}")


class Retries:
    """Counts the retries of each epoch, of all ranks that share `store`.

    A counter, not a collective: the other ranks are in the middle of a step.
    """

    def __init__(self, allowed: int, store: dist.Store) -> None:
        self._allowed = allowed
        # Every rank makes its loaders in the same order, so the number is the same on all.
        self._prefix = f"ddpkit/loader_{next(_loaders_with_retries)}" if allowed else ""
        self._store = store

    def take(self, epoch: int) -> int:
        """Take one in `epoch`, and return how many are left; negative if there was none."""
        if not self._allowed:
            return -1
        return self._allowed - int(self._store.add(f"{self._prefix}/epoch_{epoch}", 1))
