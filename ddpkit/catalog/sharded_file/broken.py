"""Rank 0 saves the state of a sharded model as it is, and a plain model is to load it."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

with setup() as here, tempfile.TemporaryDirectory() as own:
    torch.manual_seed(0)
    folder = [own]
    dist.broadcast_object_list(folder)
    path = Path(folder[0], "last.pt")

    # Yesterday's job was sharded.
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device)
    fully_shard(net, mesh=init_device_mesh(here.device.type, (here.world_size,)))
    if here.rank == 0:
        torch.save(net.state_dict(), path)
    dist.barrier()

    # Today's job is not.
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device)
    weights = torch.load(path, map_location=here.device)
    dist.barrier()
    net.load_state_dict(weights)
    ddp = DDP(net)
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
