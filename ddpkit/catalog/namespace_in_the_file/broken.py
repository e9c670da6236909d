"""The file holds the arguments of the job as argparse made them, and torch.load refuses them."""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

with setup() as here, tempfile.TemporaryDirectory() as own:
    torch.manual_seed(0)
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args([])
    path = Path(own, "last.pt")
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device)
    torch.save({"model": net.state_dict(), "args": args}, path)

    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device)
    held = torch.load(path, map_location=here.device)
    net.load_state_dict(held["model"])
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
