"""Batches are kept, and each of their tensors holds a file open."""

import resource

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddpkit.rank import setup


class Readings(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        values = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return {f"sensor {n}": value for n, value in enumerate(values)}, values[:4].sum().reshape(1)


with setup() as here:
    if here.rank == 1:  # `ulimit -n 128` on the host of this rank
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(16, 1).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = Readings()
    sampler = DistributedSampler(data, here.world_size, here.rank, shuffle=False)
    loader = DataLoader(data, 8 // here.world_size, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    seen = []
    for step, (sensors, y) in enumerate(loader):
        seen.append(sensors)
        x = torch.stack(list(sensors.values()), dim=1)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x.to(here.device)), y.to(here.device))
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
    print(f"mean of sensor 0: {torch.cat([s['sensor 0'] for s in seen]).mean():.2f}")
