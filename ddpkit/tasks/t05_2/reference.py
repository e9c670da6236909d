"""What one process computes in exercise 05.2."""

import os

import torch
from torch import nn

ranks, seed = int(os.environ["DDPKIT_RANKS"]), int(os.environ["DDPKIT_SEED"])
torch.manual_seed(seed)


def frame(i):
    made = torch.Generator().manual_seed(1000 * seed + i)
    return torch.randint(0, 256, (3, 128, 128), dtype=torch.uint8, generator=made).float() / 255


net = nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(192, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
# DistributedSampler fills up with the first samples, so that every rank has as many.
order = [*range(40), *range(-40 % ranks)]
for start in range(0, len(order), 4 * ranks):
    x = torch.stack([frame(i) for i in order[start : start + 4 * ranks]])
    loss = nn.functional.mse_loss(net(x), x[:, 0, 0, :1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
