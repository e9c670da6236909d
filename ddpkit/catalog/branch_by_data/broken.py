"""A branch depends on the batch, and the batches of a step differ by rank."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.long = nn.Linear(32, 32)
        self.head = nn.Linear(32, 1)

    def forward(self, x, length):
        x = self.body(x).relu()
        if length > 32:
            x = x + self.long(x)
        return self.head(x)


with setup() as here:
    torch.manual_seed(0)
    inputs, targets = torch.randn(6, 8, 16), torch.randn(6, 8, 1)
    lengths = [[64, 48], [72, 31], [25, 66], [58, 70], [33, 29], [61, 40]]  # by step, of each rank's batch
    ddp = DDP(Net().to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(6):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        length = lengths[step][here.rank]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x, length), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
