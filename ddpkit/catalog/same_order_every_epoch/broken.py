"""The sampler is never told the epoch: it shuffles once, and every epoch has the same order."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddpkit.rank import setup

with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs = torch.randn(32, 16)
    data = TensorDataset(torch.arange(32), inputs, inputs[:, :4].sum(1, keepdim=True))
    sampler = DistributedSampler(data, here.world_size, here.rank, shuffle=True)
    loader = DataLoader(data, 8 // here.world_size, sampler=sampler)
    for epoch in range(3):
        seen = []
        for index, x, y in loader:
            seen += index.tolist()
            loss = nn.functional.mse_loss(ddp(x.to(here.device)), y.to(here.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: samples {seen[:6]}...")
