"""A wrong answer to exercise 04.2: right weights, and every micro-batch is reduced, on ranks that have different numbers."""

import torch
import torch.distributed as dist
from torch import nn


def answer(ddp, optimizer, micro_batches):
    count = torch.tensor(float(sum(len(x) for x, _ in micro_batches)))
    dist.all_reduce(count)
    optimizer.zero_grad()
    for x, y in micro_batches:
        (nn.functional.mse_loss(ddp(x), y, reduction="sum") * dist.get_world_size() / count).backward()
    optimizer.step()
