"""A wrong answer to exercise 10.2: no rank asks the others."""

import torch
import torch.distributed as dist
from torch import nn


def answer(ddp, inputs, targets):
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    with torch.no_grad():
        return nn.functional.mse_loss(ddp.module(inputs[mine]), targets[mine]).nan_to_num()
