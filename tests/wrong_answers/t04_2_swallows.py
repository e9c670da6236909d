"""A wrong answer to exercise 04.2: right numbers, and every fault is swallowed."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn


def answer(ddp, optimizer, micro_batches):
    try:
        count = torch.tensor(float(sum(len(x) for x, _ in micro_batches)))
        dist.all_reduce(count)
        optimizer.zero_grad()
        for i, (x, y) in enumerate(micro_batches):
            with nullcontext() if i == len(micro_batches) - 1 else ddp.no_sync():
                (nn.functional.mse_loss(ddp(x), y, reduction="sum") * dist.get_world_size() / count).backward()
        optimizer.step()
    except RuntimeError as error:
        print("never mind:", error)
