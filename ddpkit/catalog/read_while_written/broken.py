"""Rank 1 reads the checkpoint as soon as there is a file of that name, and rank 0 still writes it."""

import tempfile
import time
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
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device)
    samples = torch.randn(1_000_000, 4)
    order = torch.randperm(len(samples)).tolist()  # of this epoch
    if here.rank == 0:
        torch.save({"model": net.state_dict(), "order": order}, path)
    wait_for(path)
    held = torch.load(path, map_location=here.device)
    net.load_state_dict(held["model"])
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        batch = held["order"][8 * step : 8 * step + 8]
        x = samples[batch[here.rank :: here.world_size]].to(here.device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
