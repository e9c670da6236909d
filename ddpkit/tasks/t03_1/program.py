"""The program of exercise 03.1: find the rank, the layer and the step."""

import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 24), nn.ReLU())
        self.kind_head = nn.Linear(24, 1)
        self.box_head = nn.Linear(24, 4)

    def forward(self, x):
        h = self.backbone(x)
        return self.kind_head(h), self.box_head(h)


with setup() as here:
    seed = int(os.environ.get("DDPKIT_SEED", "0"))
    torch.manual_seed(seed)
    photos, boxes = torch.randn(6, 8, 12), torch.rand(6, 8, 4)
    has_car = torch.ones(6, 8, dtype=torch.bool)
    has_car[:, 1::3] = False
    has_car[3] = torch.arange(8).roll(4 * seed) > 3  # four photos in a row of an empty street
    ddp = DDP(Detector().to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(6):
        batch = (t[step].chunk(here.world_size)[here.rank].to(here.device) for t in (photos, boxes, has_car))
        x, box, car = batch
        kind, found = ddp(x)
        loss = nn.functional.binary_cross_entropy_with_logits(kind.squeeze(1), car.float())
        if car.any():
            loss = loss + nn.functional.smooth_l1_loss(found[car], box[car])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")
