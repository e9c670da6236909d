"""The program of exercise 09.1: find the rank that trains on from random weights."""

import os
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


def fresh(device):
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)


def train(wrapped, inputs, first, here):
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.02)
    for step, x in enumerate(inputs, first):
        mine = x.chunk(here.world_size)[here.rank].to(here.device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(wrapped(mine), mine.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.2f}")


# Two hosts: each rank has a disk of its own.
with setup() as here, tempfile.TemporaryDirectory() as disk:
    seed = int(os.environ.get("DDPKIT_SEED", "0"))
    torch.manual_seed(seed)
    inputs = torch.randn(400, 16, 16)
    writer = (seed + 1) % here.world_size
    path = Path(disk, "last.pt")

    # Yesterday.
    old = DDP(fresh(here.device))
    train(old, inputs[:300], 0, here)
    if here.rank == writer:
        torch.save(old.module.state_dict(), path)

    # Today.
    ddp = DDP(fresh(here.device))
    if path.exists():
        weights = torch.load(path, map_location=here.device)
        ddp.module.load_state_dict(weights)
    train(ddp, inputs[300:], 300, here)
