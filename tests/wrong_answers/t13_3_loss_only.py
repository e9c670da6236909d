"""A wrong answer to exercise 13.3: all ranks agree about the loss, and the loss is fine where the gradient is not."""

import torch
import torch.distributed as dist
from torch import nn


def answer(ddp, optimizer, x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    bad = torch.tensor(float(not loss.isfinite()))
    dist.all_reduce(bad, dist.ReduceOp.MAX)
    if not bad:
        optimizer.step()
