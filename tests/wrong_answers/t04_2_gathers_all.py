"""A wrong answer to exercise 04.2: right weights, and every rank computes everything; no gradient is reduced."""

from itertools import chain

import torch
import torch.distributed as dist
from torch import nn


def answer(ddp, optimizer, micro_batches):
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, micro_batches)
    x, y = (torch.cat(parts) for parts in zip(*chain(*everything), strict=True))
    optimizer.zero_grad()
    nn.functional.mse_loss(ddp.module(x), y).backward()
    optimizer.step()
