"""A wrong answer to exercise 10.2: the sampler gives some samples to both ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler


def answer(ddp, inputs, targets):
    mine = list(DistributedSampler(inputs, shuffle=False))
    with torch.no_grad():
        error = nn.functional.mse_loss(ddp(inputs[mine]), targets[mine], reduction="sum")
    total = torch.tensor([error, len(mine)])
    dist.all_reduce(total)
    return total[0] / total[1]
