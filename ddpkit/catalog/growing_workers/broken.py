"""Every worker's own memory grows with the samples that it has read."""

import numpy as np
import psutil
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddpkit.rank import host_memory, setup


class Documents(Dataset):
    """480 documents of 2500 words, in a list, as a program reads them from a file."""

    def __init__(self):
        self.words = [f"w{i % 90001}" for i in range(1_200_000)]

    def __len__(self):
        return 480

    def __getitem__(self, i):
        if i % 80 == 1:
            memory = psutil.Process().memory_full_info()
            print(f"sample {i}: {memory.uss >> 20} MiB for the worker itself, {memory.rss >> 20} with what it shares")
        x = torch.tensor(np.bincount([int(word[1:]) % 16 for word in self.words[i::480]], minlength=16) / 300).float()
        return x, x[:4].sum().reshape(1)


with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(16, 1).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    data = Documents()
    if here.rank == 1:
        host_memory(120)
    sampler = DistributedSampler(data, here.world_size, here.rank, shuffle=False)
    loader = DataLoader(data, 16 // here.world_size, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x.to(here.device)), y.to(here.device))
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
