"""One sample is too large for fp16: its gradients overflow on rank 1, and there is no scaler that would skip the step."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(here.device))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    inputs = torch.randn(12, 8, 16)
    targets = inputs[:, :, :4].sum(2, keepdim=True)
    inputs[6, 7] *= 1000  # In millimetres; all others are in metres.
    for step in range(12):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        with torch.autocast(here.device.type, dtype=torch.float16):
            loss = nn.functional.mse_loss(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
