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
    seed = int(os.environ.get("DDPKIT_SEED", "0"))
    torch.manual_seed(seed)
    ddp = DDP(TwoTasks().to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    torch.manual_seed(1000 * seed + here.rank)  # each rank has samples of its own
    inputs, targets = torch.randn(5, 6, 10), torch.randn(5, 6, 2)
    for step in range(5):
        x, y = inputs[step].to(here.device), targets[step].to(here.device)
        optimizer.zero_grad()
        for head, wanted in (("price", y[:, :1]), ("demand", y[:, 1:])):
            nn.functional.mse_loss(ddp(x, head), wanted).backward()
        optimizer.step()
        print(f"step {step} done")
