"""GLOO_SOCKET_IFNAME names an interface of another machine."""

import os

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

os.environ["GLOO_SOCKET_IFNAME"] = "eth9"

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs, targets = torch.randn(6, 8, 16), torch.randn(6, 8, 1)
ddp = DDP(nn.Linear(16, 1))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(6):
    loss = nn.functional.mse_loss(ddp(inputs[step].chunk(ranks)[rank]), targets[step].chunk(ranks)[rank])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.2f}")
dist.destroy_process_group()
