"""A wrong answer to exercise 06.2: every part of the batch is reduced by itself."""

from torch import nn


def answer(ddp, optimizer, x, y):
    optimizer.zero_grad()
    for part, wanted in zip(x.split(1), y.split(1), strict=True):
        (nn.functional.mse_loss(ddp(part), wanted) / len(x)).backward()
    optimizer.step()
