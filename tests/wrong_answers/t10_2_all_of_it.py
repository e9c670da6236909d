"""A wrong answer to exercise 10.2: the number is right, and every rank computes every sample."""

import torch
from torch import nn


def answer(ddp, inputs, targets):
    with torch.no_grad():
        return nn.functional.mse_loss(ddp.module(inputs), targets)
