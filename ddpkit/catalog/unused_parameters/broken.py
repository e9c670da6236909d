"""A layer takes no part in the loss, on every rank."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.head = nn.Linear(32, 1)
        self.middle = nn.Linear(32, 32)

    def forward(self, x):
        x = self.body(x).relu()
        return self.head(x)


with setup() as here:
    torch.manual_seed(0)
    inputs, targets = torch.randn(6, 8, 16), torch.randn(6, 8, 1)
    ddp = DDP(Net().to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(6):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
