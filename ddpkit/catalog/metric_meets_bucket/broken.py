"""Rank 1 misses a bucket of gradients, and its metric meets rank 0's bucket."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.price = nn.Linear(32, 1)
        self.volume = nn.Linear(32, 1)

    def forward(self, x):
        x = self.body(x).relu()
        return self.price(x), self.volume(x)


with setup() as here:
    torch.manual_seed(0)
    inputs, price, volume = torch.randn(6, 8, 16), torch.randn(6, 8, 1), torch.randn(6, 8, 1)
    volume[3, 4:] = torch.nan  # some samples have no label: rank 1's share of step 3
    ddp = DDP(Net().to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(6):
        x, p, v = (t[step].chunk(here.world_size)[here.rank].to(here.device) for t in (inputs, price, volume))
        said_p, said_v = ddp(x)
        loss = nn.functional.mse_loss(said_p, p)
        if not v.isnan().any():
            loss = loss + nn.functional.mse_loss(said_v, v)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / here.world_size
        dist.all_reduce(mean)
        print(f"step {step}: loss {mean.item():.2f}")
