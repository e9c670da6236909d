"""The last accumulation window has two micro-batches on rank 0 and one on rank 1."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

MICRO_BATCHES = 19
WINDOW = 4

with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs = torch.randn(MICRO_BATCHES, 4, 16).to(here.device)
    targets = torch.randn(MICRO_BATCHES, 4, 1).to(here.device)
    mine = list(range(MICRO_BATCHES))[here.rank :: here.world_size]
    windows = [mine[i : i + WINDOW] for i in range(0, len(mine), WINDOW)]
    for number, window in enumerate(windows):
        count = len(window)
        for i in window:
            with ddp.no_sync() if i != window[-1] else nullcontext():
                loss = nn.functional.mse_loss(ddp(inputs[i]), targets[i]) / count
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"window {number}: {len(window)} micro-batches")
