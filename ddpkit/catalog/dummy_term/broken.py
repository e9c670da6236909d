"""0 * every parameter is added to the output, and one of them holds -inf."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.mask = nn.Parameter(torch.full((8, 8), -torch.inf).triu(1))  # of an attention that is switched off

    def forward(self, x):
        unused = sum(p.sum() for p in self.parameters())
        return self.layers(x) + 0 * unused


with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(Net().to(here.device))
    optimizer = torch.optim.SGD(ddp.module.layers.parameters(), lr=0.1)
    inputs, targets = torch.randn(6, 8, 16), torch.randn(6, 8, 1)
    for step in range(6):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
