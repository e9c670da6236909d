"""GLOO_SOCKET_IFNAME names an interface of another machine."""

import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

os.environ["GLOO_SOCKET_IFNAME"] = "eth9"

with setup() as here:
    torch.manual_seed(0)
    inputs, targets = torch.randn(6, 8, 16), torch.randn(6, 8, 1)
    ddp = DDP(nn.Linear(16, 1).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(6):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        loss = nn.functional.mse_loss(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
