"""Another right answer to exercise 10.2: parts in a row instead of every n-th sample, and small batches."""

import torch
import torch.distributed as dist
from torch import nn


def answer(ddp, inputs, targets):
    share = -(-len(inputs) // dist.get_world_size())
    mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in zip(inputs[mine].split(4), targets[mine].split(4), strict=True):
            total += torch.tensor([nn.functional.mse_loss(ddp.module(x), y, reduction="sum"), len(x)])
    dist.all_reduce(total)
    return total[0] / total[1]
