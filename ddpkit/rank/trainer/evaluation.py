"""The mean loss over evaluation data, each sample counted once whatever the number of ranks, for `loop.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpkit.rank.loading.loader import safe_loader

if TYPE_CHECKING:
    from ddpkit.rank.joining.process_group import Here


def evaluate(
    model: torch.nn.Module, loss_of: Callable[[Any], torch.Tensor], dataset: Any, batch_size: int, here: Here
) -> float:
    """Mean loss per sample of `dataset` over all ranks, the same on each; `loss_of` gives the mean loss of a batch.

    A sampler that pads would count some samples twice. Here the ranks' parts may differ by one sample, and a rank that has
    no batch left computes one that counts nothing: a sharded model, and DDP's buffers, need every rank in every forward.
    """
    loader = safe_loader(dataset, batch_size, here=here, shuffle=False, even=False, num_workers=0)
    rounds = math.ceil(math.ceil(len(dataset) / here.world_size) / batch_size)
    batches = iter(loader)
    sums = torch.zeros(2, dtype=torch.float64, device=here.device)
    model.eval()
    with torch.no_grad():
        spare: Any = None
        for _ in range(rounds):
            batch = next(batches, None)
            spare = spare if batch is None else batch
            if spare is None:
                spare = torch.utils.data.default_collate([dataset[0]])
            loss = loss_of(spare)
            if batch is not None:
                sums += torch.stack(
                    [loss.double() * samples(batch), torch.tensor(float(samples(batch)), device=here.device)]
                )
    model.train()
    if dist.is_initialized():
        dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def moved(nest: Any, device: torch.device) -> Any:
    """`nest` (tensors in tuples, lists and dicts) with its tensors on `device`; pinned memory is copied without waiting."""
    if isinstance(nest, torch.Tensor):
        return nest.to(device, non_blocking=True)
    if isinstance(nest, dict):
        return {key: moved(value, device) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        return type(nest)(moved(value, device) for value in nest)
    return nest


def samples(batch: Any) -> int:
    """How many samples a batch holds: the length of its first tensor."""
    first = batch
    while not isinstance(first, torch.Tensor):
        first = next(iter(first.values() if isinstance(first, dict) else first))
    return len(first)
