"""The program of exercise 02.2: train both heads, and cover nothing up."""

import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(10, 20)
        self.price, self.demand = nn.Linear(20, 1), nn.Linear(20, 1)

    def forward(self, x, head):
        h = self.body(x).relu()
        return self.price(h) if head == "price" else self.demand(h)


with setup() as here:
    torch.manual_seed(int(os.environ.get("DDPKIT_SEED", "0")))
    ddp = DDP(TwoTasks().to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    inputs, targets = torch.randn(5, 12, 10), torch.randn(5, 12, 2)
    for step in range(5):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        optimizer.zero_grad()
        for head, wanted in (("price", y[:, :1]), ("demand", y[:, 1:])):
            nn.functional.mse_loss(ddp(x, head), wanted).backward()
        optimizer.step()
        print(f"step {step} done")
