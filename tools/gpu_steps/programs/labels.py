"""A training job of two ranks whose data holds a label that is not in the table; with --good it holds none."""

import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

PRICES = {"apple": 0.4, "pear": 0.6, "plum": 0.2}
LABELS = ["apple", "pear", "plum"] * 40
if "--good" not in sys.argv:
    LABELS[35] = "quince"

with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(8, 1).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(1000):
        mine = [LABELS[(2 * step + here.rank) % len(LABELS)] for _ in range(4)]
        targets = torch.tensor([[PRICES[label]] for label in mine], device=here.device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(torch.ones(4, 8, device=here.device)), targets)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}", flush=True)
        time.sleep(0.02)
