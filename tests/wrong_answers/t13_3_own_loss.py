"""A wrong answer to exercise 13.3: the rank that meets bad data leaves its step out alone."""

from torch import nn


def answer(ddp, optimizer, x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    if not loss.isfinite():
        return
    loss.backward()
    if all(p.grad.isfinite().all() for p in ddp.parameters()):
        optimizer.step()
