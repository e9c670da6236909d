"""Written as with Accelerate: `prepare` wraps what the loop uses. AUXILIARY=main breaks it: rank 1 has no such loss."""

import os

import torch
import torch.distributed as dist
import torch.nn.parallel
from torch import nn


def prepare(model, optimizer):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False), optimizer


def is_main_process():
    return dist.get_rank() == 0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.price, self.volume = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, x, auxiliary):
        hidden = self.trunk(x).relu()
        loss = (self.price(hidden) - x.sum(1, keepdim=True)).square().mean()
        if auxiliary:
            loss = loss + (self.volume(hidden) - x.mean(1, keepdim=True)).square().mean()
        return loss


def training_function():
    torch.manual_seed(0)
    model = Model()
    model, optimizer = prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    torch.manual_seed(dist.get_rank())
    auxiliary = is_main_process() if os.environ.get("AUXILIARY") == "main" else True
    for step in range(5):
        loss = model(torch.randn(8, 8), auxiliary)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    training_function()
    dist.destroy_process_group()
