"""Parameters, gradients and optimizer state do not fit into memory."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import memory_budget, setup

HIDDEN = 1152


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


with setup() as here:
    memory_budget(198)
    torch.manual_seed(0)
    net = DDP(Net().to(here.device))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    inputs, targets = torch.randn(5, 32, HIDDEN), torch.rand(5, 32, HIDDEN)
    for step in range(5):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")
