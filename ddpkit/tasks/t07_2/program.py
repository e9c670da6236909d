"""The program of exercise 07.2: skip a step together, and cover nothing up."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

with setup() as here:
    seed = int(os.environ.get("DDPKIT_SEED", "0"))
    torch.manual_seed(seed)
    ddp = DDP(nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    off = torch.randperm(8)  # in three steps a sensor was off: in one on one rank, in two on another
    torch.manual_seed(1000 * seed + here.rank)  # each rank reads sensors of its own
    inputs, targets = torch.randn(8, 6, 10), torch.randn(8, 6, 1)
    for steps, rank in (off[:1], seed), (off[1:3], seed + 1):
        if here.rank == rank % here.world_size:
            inputs[steps, 2, 4] = torch.nan
    used = 0
    for step in range(8):
        x, y = inputs[step].to(here.device), targets[step].to(here.device)
        if x.isnan().any():
            continue
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
        used += 1
    everywhere = [None] * here.world_size
    dist.all_gather_object(everywhere, used)
    print(f"steps that each rank used: {everywhere}")
