"""A wrong answer to exercise 04.2: divided by the samples of this rank, so that a sample weighs more where there are few."""

from contextlib import nullcontext

from torch import nn


def answer(ddp, optimizer, micro_batches):
    count = sum(len(x) for x, _ in micro_batches)
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        with nullcontext() if i == len(micro_batches) - 1 else ddp.no_sync():
            (nn.functional.mse_loss(ddp(x), y, reduction="sum") / count).backward()
    optimizer.step()
