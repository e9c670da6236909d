"""Rank 0 alone calls the DDP model to evaluate it."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


class Net(nn.Module):
    def __init__(self, mean):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("mean", mean)

    def forward(self, x):
        return self.layers(x - self.mean)


with setup() as here:
    torch.manual_seed(0)
    inputs, targets = torch.randn(7, 8, 16).to(here.device), torch.randn(7, 8, 1).to(here.device)
    ddp = DDP(Net(inputs.mean((0, 1))).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(6):
        x = inputs[step].chunk(here.world_size)[here.rank]
        y = targets[step].chunk(here.world_size)[here.rank]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
        if step % 3 == 2 and here.rank == 0:
            ddp.eval()
            score = nn.functional.mse_loss(ddp(inputs[6]), targets[6])
            print(f"step {step}: held-out loss {score.item():.2f}")
            ddp.train()
