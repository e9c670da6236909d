"""Rank 1 waits for a file that rank 0 writes after the start."""

import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

data = Path(tempfile.gettempdir(), f"data_{os.environ['TORCHELASTIC_RUN_ID']}.pt")
if os.environ["RANK"] != "0":
    while not data.exists():
        time.sleep(0.1)


def download():
    torch.manual_seed(0)
    torch.save((torch.randn(6, 8, 16), torch.randn(6, 8, 1)), data)


with setup() as here:
    if here.rank == 0:
        download()
    inputs, targets = torch.load(data)
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(6):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
    if here.rank == 0:
        data.unlink()
