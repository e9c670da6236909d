"""Rank 1 skips a bad batch, and its counts are added to rank 0's gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

with setup() as here:
    torch.manual_seed(0)
    inputs, targets = torch.randn(6, 8, 4), torch.randn(6, 8, 1)
    inputs[3, 6, 2] = torch.nan  # a bad sample, in rank 1's share of step 3
    ddp = DDP(nn.Linear(4, 1).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(6):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        if x.isnan().any():
            bad = torch.zeros(5, device=here.device)  # bad values by column, and one more batch that is skipped
            bad[:4], bad[4] = x.isnan().sum(0), 1
            dist.all_reduce(bad)
            print(f"step {step}: skipped, {bad.tolist()}")
            continue
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
