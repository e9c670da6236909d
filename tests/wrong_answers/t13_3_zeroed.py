"""A wrong answer to exercise 13.3: it sets bad gradients to zero, and AdamW moves the weights all the same."""

from torch import nn


def answer(ddp, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.mse_loss(ddp(x), y).backward()
    for p in ddp.parameters():
        p.grad.nan_to_num_(0, 0, 0)
    optimizer.step()
