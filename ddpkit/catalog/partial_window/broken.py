"""The last window of each epoch is not full: it is never stepped, and goes into the first step of the next epoch."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

EPOCHS, MICRO_BATCHES, WINDOW = 4, 10, 4

with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.001)
    inputs = torch.randn(MICRO_BATCHES, 8, 1024)
    targets = inputs[:, :, :256].sum(2, keepdim=True)
    for epoch in range(EPOCHS):
        for i in range(MICRO_BATCHES):
            x = inputs[i].chunk(here.world_size)[here.rank].to(here.device)
            y = targets[i].chunk(here.world_size)[here.rank].to(here.device)
            last = (i + 1) % WINDOW == 0
            loss = nn.functional.mse_loss(ddp(x), y) / WINDOW
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                print(f"epoch {epoch}: step after micro-batch {i}")
