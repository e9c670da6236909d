"""The ranks make the same two heads in another order, and DDP averages them by position."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


class Net(nn.Module):
    def __init__(self, tasks):
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.heads = nn.ModuleDict({task: nn.Linear(32, 1) for task in tasks})

    def forward(self, x):
        x = self.body(x).relu()
        return {task: head(x) for task, head in self.heads.items()}


with setup() as here:
    torch.manual_seed(0)
    files = [["age", "height"], ["height", "age"]]  # Their columns.
    tasks = files[here.rank % len(files)]
    ddp = DDP(Net(tasks).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    inputs = torch.randn(10, 8, 16)
    targets = {"age": inputs[:, :, :4].sum(2, keepdim=True), "height": inputs[:, :, 4:8].sum(2, keepdim=True)}
    for step in range(10):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        loss = 0.0
        for task, out in ddp(x).items():
            y = targets[task][step].chunk(here.world_size)[here.rank].to(here.device)
            loss = loss + nn.functional.mse_loss(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
