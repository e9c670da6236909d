"""A wrong answer to exercise 04.2: right weights and one reduction, and the gradients of one window stay for the next."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn


def answer(ddp, optimizer, micro_batches):
    count = torch.tensor(float(sum(len(x) for x, _ in micro_batches)))
    dist.all_reduce(count)
    for i, (x, y) in enumerate(micro_batches):
        with nullcontext() if i == len(micro_batches) - 1 else ddp.no_sync():
            (nn.functional.mse_loss(ddp(x), y, reduction="sum") * dist.get_world_size() / count).backward()
    optimizer.step()
