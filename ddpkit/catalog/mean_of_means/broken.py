"""Each rank takes the mean over its own tokens, and DDP the mean of these means: a token of a short batch counts more."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    texts = torch.randn(10, 8, 12, 16)
    targets = texts[..., :4].sum(-1, keepdim=True)
    lengths = torch.randint(1, 13, (10, 8))
    for step in range(10):
        x = texts[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        length = lengths[step].chunk(here.world_size)[here.rank].to(here.device)
        real = torch.arange(12, device=here.device) < length[:, None]  # The rest is padding.
        error = (ddp(x) - y)[real].square()
        loss = error.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: {len(error)} tokens, loss {loss.item():.2f}")
