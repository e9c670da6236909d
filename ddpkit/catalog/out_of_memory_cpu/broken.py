"""The activations of one step do not fit into memory."""

import argparse

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import memory_budget, setup

parser = argparse.ArgumentParser()
parser.add_argument("--num_points", type=int, default=2048)
args = parser.parse_args()


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(3, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(5))
        self.head = nn.Linear(64, 1)

    def forward(self, points):
        x = self.lift(points)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


with setup() as here:
    memory_budget(80)
    torch.manual_seed(0)
    ddp = DDP(PointNet().to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(5):
        clouds, targets = torch.randn(8, args.num_points, 3), torch.randn(8, 1)
        x = clouds.chunk(here.world_size)[here.rank].to(here.device)
        y = targets.chunk(here.world_size)[here.rank].to(here.device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")
