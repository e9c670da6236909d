"""Each head has a forward and a backward of its own, twice a step."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.heads = nn.ModuleDict({"price": nn.Linear(32, 1), "volume": nn.Linear(32, 1)})

    def forward(self, x, task):
        return self.heads[task](self.body(x).relu())


with setup() as here:
    torch.manual_seed(0)
    inputs = torch.randn(6, 8, 16)
    targets = {"price": torch.randn(6, 8, 1), "volume": torch.randn(6, 8, 1)}
    ddp = DDP(Net().to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(6):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = {task: t[step].chunk(here.world_size)[here.rank].to(here.device) for task, t in targets.items()}
        optimizer.zero_grad()
        for task in targets:
            loss = nn.functional.mse_loss(ddp(x, task), y[task])
            loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
