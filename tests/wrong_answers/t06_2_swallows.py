"""A wrong answer to exercise 06.2: right numbers, and every fault is swallowed."""

from contextlib import nullcontext

from torch import nn


def answer(ddp, optimizer, x, y):
    try:
        optimizer.zero_grad()
        for i in range(len(x)):
            with nullcontext() if i == len(x) - 1 else ddp.no_sync():
                (nn.functional.mse_loss(ddp(x[i : i + 1]), y[i : i + 1]) / len(x)).backward()
        optimizer.step()
    except RuntimeError as error:
        print("never mind:", error)
