"""A wrong answer to exercise 06.2: it skips what does not fit."""

from torch import nn


def answer(ddp, optimizer, x, y):
    optimizer.zero_grad()
    try:
        nn.functional.mse_loss(ddp(x), y).backward()
    except RuntimeError as error:
        print("skipped:", error)
        return
    optimizer.step()
