"""The program of exercise 11.1: find the rank that holds up the other."""

import os
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


def watch(net):
    """How much each layer can stretch its input."""
    return [torch.linalg.svdvals(p.detach())[0].item() for p in net.parameters() if p.dim() == 2]


with setup() as here:
    seed = int(os.environ.get("DDPKIT_SEED", "0"))
    torch.manual_seed(seed)
    ddp = DDP(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.001)
    inputs = torch.randn(20, 32, 512)
    for step in range(20):
        began = time.perf_counter()
        x = inputs[step].chunk(here.world_size)[here.rank]
        loss = ddp(x).sub(x[:, :1]).square().mean()
        forward = time.perf_counter()
        optimizer.zero_grad()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        if here.rank == seed % here.world_size:
            stretch = watch(ddp.module)
        ended = time.perf_counter()
        phases = {"forward": forward - began, "backward": backward - forward, "step": ended - backward}
        print(f"step {step}:", *[f"{name} {1000 * seconds:.0f} ms" for name, seconds in phases.items()])
