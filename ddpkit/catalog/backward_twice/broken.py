"""One forward and two backwards: the second one is not reduced."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs, targets = torch.randn(8, 8, 16), torch.randn(8, 8, 1)
    for step in range(8):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        said = ddp(x)
        error = nn.functional.mse_loss(said, y)
        size = said.square().mean()
        optimizer.zero_grad()
        error.backward(retain_graph=True)
        size.backward()
        optimizer.step()
        print(f"step {step}: error {error.item():.2f}, size {size.item():.2f}")
