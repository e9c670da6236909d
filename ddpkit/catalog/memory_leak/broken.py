"""Losses that are kept for the log keep their graphs."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import memory_budget, setup

with setup() as here:
    memory_budget(64)
    torch.manual_seed(0)
    hidden = (nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
    net = nn.Sequential(*hidden, nn.Linear(128, 1)).to(here.device)
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs, targets = torch.randn(12, 256, 32), torch.randn(12, 256, 1)
    held_out, answers = torch.randn(4096, 32).to(here.device), torch.randn(4096, 1).to(here.device)
    total, history = 0.0, []
    for step in range(12):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        total += loss
        history.append(mse_loss(net(held_out), answers))
        print(f"step {step}: mean loss {total / (step + 1):.3f}, held out {history[-1]:.3f}")
