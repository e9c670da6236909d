"""One rank falls back to another way to connect, and does not tell the other rank."""

import os

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
fast = ["lo", "ib0"][rank]  # The fast interface of each rank's host, as the inventory says.


def connect(interface):
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group("gloo")


try:
    connect(fast)
except RuntimeError as error:
    print(f"falling back to lo: {error}")
    connect("lo")
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
