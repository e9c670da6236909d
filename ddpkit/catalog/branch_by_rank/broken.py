"""Rank 1 leaves out a branch that rank 0 takes."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.extra = nn.Linear(32, 32)
        self.head = nn.Linear(32, 1)

    def forward(self, x, use_extra):
        x = self.body(x).relu()
        if use_extra:
            x = x + self.extra(x)
        return self.head(x)


with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(Net().to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    inputs, targets = torch.randn(6, 8, 16), torch.randn(6, 8, 1)
    for step in range(6):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x, use_extra=here.rank == 0), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
