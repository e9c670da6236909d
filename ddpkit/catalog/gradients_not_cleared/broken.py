"""The gradients are never cleared: each window's are added to those of all windows before it."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

WINDOW = 4

with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.07)
    inputs = torch.randn(WINDOW, 8, 16)
    for step in range(25):
        total = 0.0
        for part in range(WINDOW):
            x = inputs[part].chunk(here.world_size)[here.rank].to(here.device)
            with nullcontext() if part == WINDOW - 1 else ddp.no_sync():
                loss = nn.functional.mse_loss(ddp(x), x.sum(1, keepdim=True)) / WINDOW
                loss.backward()
            total += loss.item()
        optimizer.step()
        print(f"step {step}: loss {total:.2f}")
