"""Every rank saves its own part of the data to one path, and all go on with the part of one."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

with setup() as here, tempfile.TemporaryDirectory() as own:
    torch.manual_seed(0)
    folder = [own]
    dist.broadcast_object_list(folder)
    inputs = torch.randn(48, 4).to(here.device)

    # Yesterday's job ends with a checkpoint: its weights, and the samples that each rank has not seen yet.
    net = nn.Linear(4, 1).to(here.device)
    unseen = torch.randperm(48).view(6, 8)[:, here.rank :: here.world_size].clone()
    path = Path(folder[0], "last.pt")
    torch.save({"model": net.state_dict(), "unseen": unseen}, path)
    dist.barrier()

    # Today's job goes on from it.
    held = torch.load(path, map_location=here.device)
    net.load_state_dict(held["model"])
    unseen = held["unseen"]
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step, samples in enumerate(unseen):
        x = inputs[samples]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), x.square().sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        print(f"step {step}: samples {samples.tolist()}, loss {loss.item():.2f}")
