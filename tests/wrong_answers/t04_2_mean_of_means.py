"""A wrong answer to exercise 04.2: each micro-batch weighs the same, whatever its size."""

from contextlib import nullcontext

from torch import nn


def answer(ddp, optimizer, micro_batches):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        with nullcontext() if i == len(micro_batches) - 1 else ddp.no_sync():
            (nn.functional.mse_loss(ddp(x), y) / len(micro_batches)).backward()
    optimizer.step()
