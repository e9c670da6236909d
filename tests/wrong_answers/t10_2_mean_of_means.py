"""A wrong answer to exercise 10.2: each rank's mean counts alike, and that of a rank without samples is nan."""

import torch
import torch.distributed as dist
from torch import nn


def answer(ddp, inputs, targets):
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    with torch.no_grad():
        mean = nn.functional.mse_loss(ddp(inputs[mine]), targets[mine])
    dist.all_reduce(mean)
    return mean / dist.get_world_size()
