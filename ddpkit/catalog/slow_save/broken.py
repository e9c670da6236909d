"""Rank 0 saves for longer than the others may wait."""

import io
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


def save(state, file):
    """To a file server that takes its time for each tensor."""
    for name, tensor in state.items():
        time.sleep(0.45)
        torch.save((name, tensor), file)


with setup(timeout_s=3) as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = torch.randn(6, 8, 16).to(here.device), torch.randn(6, 8, 1).to(here.device)
    for step in range(6):
        x = inputs[step].chunk(here.world_size)[here.rank]
        y = targets[step].chunk(here.world_size)[here.rank]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
        if step == 2 and here.rank == 0:
            state = dict(ddp.module.state_dict())
            state |= {f"momentum {i}": s["momentum_buffer"] for i, s in enumerate(optimizer.state.values())}
            save(state, io.BytesIO())
            print(f"step {step}: saved {len(state)} tensors")
