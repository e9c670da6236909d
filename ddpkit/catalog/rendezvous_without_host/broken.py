"""Two agents, and neither of them hosts the rendezvous."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs, targets = torch.randn(6, 8, 16).to(here.device), torch.randn(6, 8, 1).to(here.device)
    for step in range(6):
        x = inputs[step].chunk(here.world_size)[here.rank]
        y = targets[step].chunk(here.world_size)[here.rank]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
