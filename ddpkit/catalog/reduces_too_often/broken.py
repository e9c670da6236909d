"""Four micro-batches for each step, and DDP reduces the gradients of each of them."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import CommProfiler, report, setup

STEPS, WINDOW = 6, 4

with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.001)
    inputs = torch.randn(STEPS, WINDOW, 8, 512)
    with CommProfiler(ddp) as comm:
        for step in range(STEPS):
            for micro in range(WINDOW):
                x = inputs[step, micro].chunk(here.world_size)[here.rank].to(here.device)
                loss = ddp(x).sub(x[:, :1]).square().mean() / WINDOW
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    told = comm.stats()
    print(f"{STEPS} steps, gradients reduced {told['passes']} times")
    report(comm=told, wasted=1 - STEPS / told["passes"])
