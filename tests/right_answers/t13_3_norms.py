"""Another right answer to exercise 13.3: the norm of all gradients tells, and gradients are cleared after the step."""

import torch
from torch import nn


def answer(ddp, optimizer, x, y):
    nn.functional.mse_loss(ddp(x), y).backward()
    if torch.stack([p.grad.norm() for p in ddp.parameters()]).norm().isfinite():
        optimizer.step()
    optimizer.zero_grad()
