"""What one process computes in exercise 02.2."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ["DDPKIT_SEED"]))
body, price, demand = nn.Linear(10, 20), nn.Linear(20, 1), nn.Linear(20, 1)
net = nn.ModuleDict({"body": body, "price": price, "demand": demand})
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
inputs, targets = torch.randn(5, 12, 10), torch.randn(5, 12, 2)
for step in range(5):
    h = body(inputs[step]).relu()
    loss = nn.functional.mse_loss(price(h), targets[step][:, :1]) + nn.functional.mse_loss(
        demand(h), targets[step][:, 1:]
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
