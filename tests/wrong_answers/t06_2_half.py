"""A wrong answer to exercise 06.2: half of the batch is left out."""

from torch import nn


def answer(ddp, optimizer, x, y):
    x, y = x[: len(x) // 2], y[: len(y) // 2]
    optimizer.zero_grad()
    nn.functional.mse_loss(ddp(x), y).backward()
    optimizer.step()
