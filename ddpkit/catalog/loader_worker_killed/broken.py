"""One sample is larger than the memory of a host, and the worker of rank 1 that reads it is killed."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddpkit.rank import host_memory, setup


class Scans(Dataset):
    """48 scans. Most are one slice of 1 MiB; number 21 is a whole body of 192 slices."""

    def __len__(self):
        return 48

    def slices(self, i):
        noise = torch.Generator().manual_seed(i)
        pattern = torch.randn(16, 1, generator=noise)
        for _ in range(192 if i == 21 else 1):
            yield pattern + torch.randn(16, 16384, generator=noise)

    def __getitem__(self, i):
        scan = torch.cat(list(self.slices(i)), dim=1)
        x = scan.mean(dim=1)
        return x, x[:4].sum().reshape(1)


with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(16, 1).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    host_memory(160)
    data = Scans()
    sampler = DistributedSampler(data, here.world_size, here.rank, shuffle=False)
    loader = DataLoader(data, 8 // here.world_size, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x.to(here.device)), y.to(here.device))
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
