"""A wrong answer to exercise 06.2: parts of different size weigh the same."""

from contextlib import nullcontext

from torch import nn


def answer(ddp, optimizer, x, y):
    optimizer.zero_grad()
    xs, ys = x.chunk(4), y.chunk(4)
    for i in range(len(xs)):
        with nullcontext() if i == len(xs) - 1 else ddp.no_sync():
            (nn.functional.mse_loss(ddp(xs[i]), ys[i]) / 4).backward()
    optimizer.step()
