"""The program of exercise 02.1: find the parameters that the loss forgets."""

import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 24), nn.GELU())
        self.mean_head = nn.Linear(24, 1)
        self.scale_head = nn.Linear(24, 1)

    def forward(self, x):
        h = self.encoder(x)
        return self.mean_head(h), nn.functional.softplus(self.scale_head(h))


with setup() as here:
    torch.manual_seed(int(os.environ.get("DDPKIT_SEED", "0")))
    ddp = DDP(Forecast().to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    inputs, targets = torch.randn(5, 8, 12), torch.randn(5, 8, 1)
    for step in range(5):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        mean, scale = ddp(x)
        loss = nn.functional.mse_loss(mean, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")
