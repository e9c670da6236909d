"""The mean loss over evaluation data, each sample counted once whatever the number of ranks, for `loop.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from ddpkit.rank.joining.process_group import Here
from ddpkit.rank.loading.loader import safe_loader


def evaluate(
    model: torch.nn.Module, loss_of: Callable[[Any], torch.Tensor], dataset: Any, batch_size: int, here: Here
) -> float:
    """Mean loss per sample of `dataset` over all ranks, the same on each; `loss_of` gives the mean loss of a batch.

    A sampler that pads would count some samples twice. Here a rank may have one sample more than another. A rank without
    a batch computes one that does not count: a sharded model, and DDP's buffers, need every rank in every forward.
    """
    batches = iter(safe_loader(dataset, batch_size, here=here, even=False, num_workers=0))
    rounds = math.ceil(math.ceil(len(dataset) / here.world_size) / batch_size)
    total, count = torch.zeros((), dtype=torch.float64, device=here.device), 0
    spare: Any = None
    model.eval()
    with torch.no_grad():
        for _ in range(rounds):
            batch = next(batches, None)
            spare = spare if batch is None else batch
            if spare is None:
                spare = torch.utils.data.default_collate([dataset[0]])
            loss = loss_of(spare)
            if batch is not None:
                total += loss.double() * samples(batch)
                count += samples(batch)
    model.train()
    sums = torch.stack([total, torch.full_like(total, count)])
    if dist.is_initialized():
        dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def moved(batch: Any, device: torch.device) -> Any:
    """`batch` with all its tensors on `device`; pinned memory is copied without waiting."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def samples(batch: Any) -> int:
    """How many samples a batch holds: the length of its first tensor."""
    return next(len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
