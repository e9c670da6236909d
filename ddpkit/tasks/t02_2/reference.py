"""What one process computes in exercise 02.2."""

import os

import torch
from torch import nn

ranks, seed = int(os.environ["DDPKIT_RANKS"]), int(os.environ["DDPKIT_SEED"])
torch.manual_seed(seed)
body, price, demand = nn.Linear(10, 20), nn.Linear(20, 1), nn.Linear(20, 1)
net = nn.ModuleDict({"body": body, "price": price, "demand": demand})
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
shares = []
for rank in range(ranks):
    torch.manual_seed(1000 * seed + rank)
    shares.append((torch.randn(5, 6, 10), torch.randn(5, 6, 2)))
inputs, targets = (torch.cat(parts, dim=1) for parts in zip(*shares, strict=True))
for step in range(5):
    h = body(inputs[step]).relu()
    loss = nn.functional.mse_loss(price(h), targets[step][:, :1]) + nn.functional.mse_loss(
        demand(h), targets[step][:, 1:]
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
