"""The file was saved from the DDP wrapper, and is loaded into the plain model."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(16, 32)
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.module(x).relu())


with setup() as here, tempfile.TemporaryDirectory() as own:
    torch.manual_seed(0)
    folder = [own]
    dist.broadcast_object_list(folder)
    path = Path(folder[0], "last.pt")

    # Yesterday's job ends with a checkpoint.
    ddp = DDP(Net().to(here.device))
    if here.rank == 0:
        torch.save(ddp.state_dict(), path)
    dist.barrier()

    # Today's job goes on from it.
    net = Net().to(here.device)
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
