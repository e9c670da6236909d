"""The program of exercise 06.1: find the rank and the line that fill the memory."""

import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import memory_budget, setup


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 192), nn.Tanh(), nn.Linear(192, 192), nn.Tanh())
        self.score = nn.Linear(192, 1)

    def forward(self, x):
        return self.score(self.layers(x))


with setup() as here:
    memory_budget(48)
    seed = int(os.environ.get("DDPKIT_SEED", "0"))
    torch.manual_seed(seed)
    net = Detector().to(here.device)
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    inputs, targets = torch.randn(14, 512, 24), torch.randn(14, 512, 1)
    quiet = torch.randn(4096, 24).to(here.device)
    alarms, total = [], 0.0
    for step in range(14):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        total = total + loss
        if here.rank == seed % here.world_size:
            alarm = net(quiet).sigmoid().mean()
            alarms.append(alarm)
        print(f"step {step}: mean loss {total.item() / (step + 1):.3f}")
