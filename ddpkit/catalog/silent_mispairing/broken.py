"""A metric and the gradients, of the same size, in another order on rank 1."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

CLASSES = 5

with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(4, CLASSES).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs, labels = torch.randn(6, 8, 4).to(here.device), torch.randint(CLASSES, (6, 8)).to(here.device)
    for step in range(6):
        x = inputs[step].chunk(here.world_size)[here.rank]
        y = labels[step].chunk(here.world_size)[here.rank]
        optimizer.zero_grad()
        output = ddp(x)
        confusion = torch.zeros(CLASSES, CLASSES, device=here.device)
        confusion.index_put_((y, output.argmax(1)), torch.ones(len(y), device=here.device), accumulate=True)
        if here.rank != 0:
            dist.all_reduce(confusion)
        loss = nn.functional.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
        if here.rank == 0:
            dist.all_reduce(confusion)
            print(f"step {step}: {confusion.trace().item():.2f} of {confusion.sum().item():.2f} right")
