"""Every rank reads the same samples: nothing fails, and the batch is smaller than it looks."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddpkit.rank import setup

with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs = torch.randn(64, 16)
    data = TensorDataset(inputs, inputs[:, :4].sum(1, keepdim=True))
    sampler = None
    loader = DataLoader(data, 8 // here.world_size, sampler=sampler)
    for step, (x, y) in enumerate(loader):
        if step == 8:
            break  # 8 steps of 8 samples are an epoch.
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x.to(here.device)), y.to(here.device))
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
