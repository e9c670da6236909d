"""The loss is divided by the number of ranks, and DDP divides the gradients by it again."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, weight_decay=0.01)
    inputs = torch.randn(20, 8, 16)
    targets = inputs[:, :, :4].sum(2, keepdim=True)
    for step in range(20):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        loss = nn.functional.mse_loss(ddp(x), y) / here.world_size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.distributed.all_reduce(total := loss.detach().clone())
        print(f"step {step}: loss {total.item():.2f}")
