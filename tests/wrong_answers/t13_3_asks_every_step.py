"""A wrong answer to exercise 13.3: right numbers, and one collective more in each step."""

import torch
import torch.distributed as dist
from torch import nn


def answer(ddp, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.mse_loss(ddp(x), y).backward()
    bad = torch.tensor(float(not all(p.grad.isfinite().all() for p in ddp.parameters())))
    dist.all_reduce(bad, dist.ReduceOp.MAX)
    if not bad:
        optimizer.step()
