"""BatchNorm normalises by the four samples of its own rank, where one process normalises by all eight."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.norm(self.body(x)).relu())


with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(Net().to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    inputs = torch.randn(10, 8, 16)
    targets = inputs[:, :, :4].sum(2, keepdim=True)
    for step in range(10):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        loss = nn.functional.mse_loss(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}, running mean of feature 0 {ddp.module.norm.running_mean[0]:.4f}")
