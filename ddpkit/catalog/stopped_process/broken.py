"""Rank 1 is stopped by a signal in the middle of a step."""

import os
import signal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

FIRST_ATTEMPT = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def get_stopped():
    """What a debugger or a scheduler that suspends the job does from outside."""
    os.kill(os.getpid(), signal.SIGSTOP)


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
        if step == 3 and here.rank == 1 and FIRST_ATTEMPT:
            get_stopped()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
