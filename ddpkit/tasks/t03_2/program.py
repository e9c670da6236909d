"""The program of exercise 03.2: train every expert, on whichever rank its samples are."""

import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(10, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 1) for _ in range(3))

    def forward(self, x, kind):
        h = self.body(x).relu()
        out = h.new_zeros(len(x), 1)
        for number, expert in enumerate(self.experts):
            mine = kind == number
            if mine.any():
                out[mine] = expert(h[mine])
        return out


with setup() as here:
    seed = int(os.environ.get("DDPKIT_SEED", "0"))
    torch.manual_seed(seed)
    ddp = DDP(Experts().to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    kinds = torch.arange(12).remainder(3).repeat(6, 1)
    kinds[2] = kinds[2].sort().values  # this part of the data came sorted
    kinds = kinds.chunk(here.world_size, dim=1)[here.rank]
    torch.manual_seed(1000 * seed + here.rank)  # each rank has samples of its own
    inputs, targets = torch.randn(*kinds.shape, 10), torch.randn(*kinds.shape, 1)
    for step in range(6):
        x, y, kind = (t[step].to(here.device) for t in (inputs, targets, kinds))
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x, kind), y).backward()
        optimizer.step()
        print(f"step {step} done")
