"""Another right answer to exercise 04.2: DDP reduces nothing, and the gradients are added up once by hand."""

import torch
import torch.distributed as dist
from torch import nn


def answer(ddp, optimizer, micro_batches):
    count = torch.tensor(float(sum(len(x) for x, _ in micro_batches)))
    dist.all_reduce(count)
    optimizer.zero_grad()
    with ddp.no_sync():
        for x, y in micro_batches:
            nn.functional.mse_loss(ddp(x), y, reduction="sum").backward()
    for p in ddp.parameters():
        dist.all_reduce(p.grad)
        p.grad /= count
    optimizer.step()
