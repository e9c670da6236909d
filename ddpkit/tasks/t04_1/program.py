"""The program of exercise 04.1: find the micro-batch that is missing."""

import os
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

WINDOW = 4

with setup() as here:
    seed = int(os.environ.get("DDPKIT_SEED", "0"))
    torch.manual_seed(seed)
    ddp = DDP(nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    inputs, targets = torch.randn(16, 8, 12), torch.randn(16, 8, 1)
    # Two readings of a sensor that was off, one on each rank.
    inputs[2].chunk(here.world_size)[(seed + 1) % here.world_size][0] = torch.nan
    inputs[7].chunk(here.world_size)[seed % here.world_size][0] = torch.nan
    for i in range(16):
        x = inputs[i].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[i].chunk(here.world_size)[here.rank].to(here.device)
        last = (i + 1) % WINDOW == 0
        if x.isnan().any():
            print(f"micro-batch {i}: skipped")
            continue
        with nullcontext() if last else ddp.no_sync():
            loss = nn.functional.mse_loss(ddp(x), y) / WINDOW
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
            print(f"micro-batch {i}: step")
