"""A wrong answer to exercise 13.3: right numbers, and every fault is swallowed."""

from torch import nn


def answer(ddp, optimizer, x, y):
    try:
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        if all(p.grad.isfinite().all() for p in ddp.parameters()):
            optimizer.step()
    except RuntimeError as error:
        print("never mind:", error)
