"""Another right answer to exercise 06.2: one sample at a time, losses summed, and divided by hand before the step."""

from contextlib import nullcontext

from torch import nn


def answer(ddp, optimizer, x, y):
    optimizer.zero_grad()
    for i in range(len(x)):
        with nullcontext() if i == len(x) - 1 else ddp.no_sync():
            nn.functional.mse_loss(ddp(x[i : i + 1]), y[i : i + 1], reduction="sum").backward()
    for p in ddp.parameters():
        p.grad /= len(x)
    optimizer.step()
