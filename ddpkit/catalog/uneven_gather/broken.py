"""Nine held-out samples on two ranks, gathered as tensors."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


def evaluate(model, x, y, here):
    """The error of every held-out sample, from all ranks."""
    x, y = x.chunk(here.world_size)[here.rank], y.chunk(here.world_size)[here.rank]
    with torch.no_grad():
        mine = (model(x) - y).abs().flatten()
    errors = [torch.empty_like(mine) for _ in range(here.world_size)]
    dist.all_gather(errors, mine)
    return torch.cat(errors)


with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs, targets = torch.randn(6, 8, 16).to(here.device), torch.randn(6, 8, 1).to(here.device)
    held_out = torch.randn(9, 16).to(here.device), torch.randn(9, 1).to(here.device)
    for step in range(6):
        x = inputs[step].chunk(here.world_size)[here.rank]
        y = targets[step].chunk(here.world_size)[here.rank]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
        if step % 3 == 2:
            errors = evaluate(ddp, *held_out, here)
            print(f"step {step}: {len(errors)} samples, mean error {errors.mean().item():.2f}")
