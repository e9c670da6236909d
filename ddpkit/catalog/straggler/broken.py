"""One document takes longer than the others may wait."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


def encode(document):
    """The sum of its words' vectors; it takes a millisecond for each word."""
    time.sleep(len(document) / 1000)
    return document.sum(0)


with setup(timeout_s=3) as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    documents = [[torch.randn(3, 16) for _ in range(8)] for _ in range(6)]
    documents[3][6] = torch.randn(3600, 16)
    targets = torch.randn(6, 8, 1).to(here.device)
    share = 8 // here.world_size
    for step in range(6):
        mine = documents[step][here.rank * share :][:share]
        x = torch.stack([encode(d) / len(d) for d in mine]).to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
