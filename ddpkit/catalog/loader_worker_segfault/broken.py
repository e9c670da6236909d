"""A DataLoader worker of rank 1 reads through a null pointer."""

import ctypes

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddpkit.rank import setup


def find(i, index):
    """The address of a sample's bytes in a native index; 0, a null pointer, for one that the index has lost."""
    return 0 if i == 21 else ctypes.addressof(index[i])


class Samples(Dataset):
    def __init__(self):
        self.rows = torch.randn(48, 16, generator=torch.Generator().manual_seed(0)).tolist()
        self.index = [(ctypes.c_float * 16)(*row) for row in self.rows]

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        found = (ctypes.c_float * 16).from_address(find(i, self.index))
        x = torch.tensor(list(found))
        return x, x[:4].sum().reshape(1)


with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(16, 1).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = Samples()
    sampler = DistributedSampler(data, here.world_size, here.rank, shuffle=False)
    loader = DataLoader(data, 8 // here.world_size, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x.to(here.device)), y.to(here.device))
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
