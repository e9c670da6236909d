"""Rank 1 reads the checkpoint as soon as there is a file of that name, and rank 0 still writes it."""

import time
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


def wait_for(path):
    while not path.exists():
        time.sleep(0.001)


with setup() as here, tempfile.TemporaryDirectory() as own:
    torch.manual_seed(0)
    folder = [own]
    dist.broadcast_object_list(folder)
    path = Path(folder[0], "last.pt")
    net = nn.Sequential(nn.Linear(16, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 1)).to(here.device)
    if here.rank == 0:
        torch.save(net.state_dict(), path)
    wait_for(path)
    net.load_state_dict(torch.load(path, map_location=here.device))
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    inputs, targets = torch.randn(2, 8, 16).to(here.device), torch.randn(2, 8, 1).to(here.device)
    for step in range(2):
        x = inputs[step].chunk(here.world_size)[here.rank]
        y = targets[step].chunk(here.world_size)[here.rank]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
