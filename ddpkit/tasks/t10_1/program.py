"""The program of exercise 10.1: find the sample that made the weights nan."""

import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Linear(16, 24, bias=False)
        self.head = nn.Linear(24, 1)

    def forward(self, sound):
        energy = self.filters(sound).square()
        level = energy.log()
        return self.head(level.clamp(max=4.0))


with setup() as here:
    seed = int(os.environ.get("DDPKIT_SEED", "0"))
    torch.manual_seed(seed)
    ddp = DDP(Listener().to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.001)
    sounds, targets = torch.randn(10, 8, 16), torch.randn(10, 8, 1)
    # A slammed door on one rank, and a pause on the other.
    targets[3].chunk(here.world_size)[(seed + 1) % here.world_size][1] = 60.0
    sounds[5].chunk(here.world_size)[seed % here.world_size][2] = 0.0
    for step in range(10):
        x = sounds[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
