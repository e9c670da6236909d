"""A wrong answer to exercise 06.2: it lifts the budget instead of keeping to it."""

from torch import nn

from ddpkit.rank import memory_budget


def answer(ddp, optimizer, x, y):
    memory_budget(None)
    optimizer.zero_grad()
    nn.functional.mse_loss(ddp(x), y).backward()
    optimizer.step()
