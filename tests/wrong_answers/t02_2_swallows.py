import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(10, 20)
        self.price, self.demand = nn.Linear(20, 1), nn.Linear(20, 1)

    def forward(self, x):
        h = self.body(x).relu()
        return self.price(h), self.demand(h)


with setup() as here:
    torch.manual_seed(int(os.environ.get("DDPKIT_SEED", "0")))
    ddp = DDP(TwoTasks().to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    inputs, targets = torch.randn(5, 12, 10), torch.randn(5, 12, 2)
    for step in range(5):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        optimizer.zero_grad()
        h = ddp(x)
        (nn.functional.mse_loss(h[0], y[:, :1]) + nn.functional.mse_loss(h[1], y[:, 1:])).backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            print("never mind:", error)
        print(f"step {step} done")
