"""The program of exercise 07.1: find the rank that went another way."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


def share(samples, here):
    return samples.chunk(here.world_size)[here.rank].to(here.device)


def worst(errors, here):
    everywhere = torch.zeros(here.world_size * len(errors), device=here.device)
    dist.all_gather_into_tensor(everywhere, errors)
    return everywhere.topk(3).values


with setup() as here:
    seed = int(os.environ.get("DDPKIT_SEED", "0"))
    torch.manual_seed(seed)
    ddp = DDP(nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    inputs, targets = torch.randn(8, 12, 12), torch.randn(8, 12, 1)
    targets[5].chunk(here.world_size)[seed % here.world_size][0] = 400.0  # a reading gone wrong
    for step in range(8):
        x, y = share(inputs[step], here), share(targets[step], here)
        errors = (ddp(x) - y).square().flatten()
        if errors.max() > 1000:
            print(f"step {step}: the worst of all ranks {worst(errors.detach(), here)}")
        optimizer.zero_grad()
        errors.mean().backward()
        optimizer.step()
