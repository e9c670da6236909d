"""A wrong answer to exercise 04.2: right numbers, by empty micro-batches that even the windows out; each of them is reduced."""

import torch
import torch.distributed as dist
from torch import nn


def answer(ddp, optimizer, micro_batches):
    count = torch.tensor(float(sum(len(x) for x, _ in micro_batches)))
    most = torch.tensor(len(micro_batches))
    dist.all_reduce(count)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    x, y = micro_batches[0]
    even = micro_batches + [(x[:0], y[:0])] * (int(most) - len(micro_batches))
    optimizer.zero_grad()
    for x, y in even:
        (nn.functional.mse_loss(ddp(x), y, reduction="sum") * dist.get_world_size() / count).backward()
    optimizer.step()
