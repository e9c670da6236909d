"""Eleven files on two ranks: rank 1 has a batch fewer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

from ddpkit.rank import setup

FILES = 11


class Shard(IterableDataset):
    """The samples of some of the files, one file after the other."""

    def __init__(self, files):
        torch.manual_seed(0)
        self.inputs, self.targets = torch.randn(FILES, 4, 16), torch.randn(FILES, 4, 1)
        self.files = files

    def __iter__(self):
        for file in self.files:
            yield from zip(self.inputs[file], self.targets[file], strict=True)


def train(ddp, optimizer, loader, here):
    steps = 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x.to(here.device)), y.to(here.device))
        loss.backward()
        optimizer.step()
        steps += 1
    print(f"{steps} steps")


with setup() as here:
    files = list(range(FILES))[here.rank :: here.world_size]
    loader = DataLoader(Shard(files), batch_size=4)
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    train(ddp, optimizer, loader, here)
