"""A sample that is constant turns into nan on rank 1, and the gradients take it to every rank."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


def normalised(x):
    """Each sample with mean 0 and deviation 1."""
    return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)


with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs, targets = torch.randn(8, 8, 16), torch.randn(8, 8, 1)
    inputs[3, 6] = 1.0  # The sensor was off.
    for step in range(8):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        loss = nn.functional.mse_loss(ddp(normalised(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
