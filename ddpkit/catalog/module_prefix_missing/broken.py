"""The file was saved from the plain model, and is loaded into the DDP wrapper."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

with setup() as here, tempfile.TemporaryDirectory() as own:
    torch.manual_seed(0)
    folder = [own]
    dist.broadcast_object_list(folder)
    path = Path(folder[0], "last.pt")

    # Yesterday's job ran in one process, without DDP.
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device)
    if here.rank == 0:
        torch.save(net.state_dict(), path)
    dist.barrier()

    # Today's job goes on from it on every rank.
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device)
    ddp = DDP(net)
    weights = torch.load(path, map_location=here.device)
    dist.barrier()
    ddp.load_state_dict(weights)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs, targets = torch.randn(4, 8, 16).to(here.device), torch.randn(4, 8, 1).to(here.device)
    for step in range(4):
        x = inputs[step].chunk(here.world_size)[here.rank]
        y = targets[step].chunk(here.world_size)[here.rank]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
