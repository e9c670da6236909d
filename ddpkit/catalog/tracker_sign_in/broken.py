"""Rank 0 signs in to a tracker that does not answer, and its exception ends the whole job."""

import json
import urllib.request

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

TRACKER = "http://localhost:1/runs"  # The tunnel to it is closed.


class Tracker:
    def __init__(self, name):
        self.log(name=name)

    def log(self, **values):
        asked = urllib.request.Request(TRACKER, json.dumps(values).encode(), {"Content-Type": "application/json"})
        urllib.request.urlopen(asked, timeout=5).close()


with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(16, 1).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs, targets = torch.randn(6, 8, 16), torch.randn(6, 8, 1)
    tracker = Tracker("baseline") if here.rank == 0 else None
    for step in range(6):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        loss = nn.functional.mse_loss(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if tracker:
            tracker.log(step=step, loss=loss.item())
