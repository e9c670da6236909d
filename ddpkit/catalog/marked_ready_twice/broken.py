"""One layer is checkpointed twice, with the reentrant kind."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from ddpkit.rank import setup


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.middle = nn.Linear(32, 32)
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        x = self.body(x).relu()
        for _ in range(2):
            x = checkpoint(self.middle, x, use_reentrant=True).relu()
        return self.head(x)


with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(Net().to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs, targets = torch.randn(6, 8, 16), torch.randn(6, 8, 1)
    for step in range(6):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
