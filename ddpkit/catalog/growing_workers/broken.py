"""Every worker's own memory grows with the samples that it has read."""

import os
import signal
import time

import numpy as np
import psutil
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

from ddpkit.rank import setup


def stay_below(limit_mib, i):
    """Rank 1's host is short of memory: its kernel ends a worker that has more than this for itself alone."""
    if here.rank == 1 and get_worker_info():
        memory = psutil.Process().memory_full_info()
        if i % 80 == 1:
            print(
                f"sample {i}: the worker has {memory.uss >> 20} MiB for itself, {memory.rss >> 20} with what it shares"
            )
        if memory.uss > limit_mib << 20:
            time.sleep(0.5)  # It looks first for what else could be freed.
            os.kill(os.getpid(), signal.SIGKILL)


class Documents(Dataset):
    """480 documents of 800 words, in a list, as a program reads them from a file."""

    def __init__(self):
        self.words = [f"w{i % 90001}" for i in range(400_000)]

    def __len__(self):
        return 480

    def __getitem__(self, i):
        x = torch.tensor(np.bincount([int(word[1:]) % 16 for word in self.words[i::480]], minlength=16) / 100).float()
        stay_below(24, i)
        return x, x[:4].sum().reshape(1)


with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(16, 1).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    data = Documents()
    sampler = DistributedSampler(data, here.world_size, here.rank, shuffle=False)
    loader = DataLoader(data, 16 // here.world_size, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x.to(here.device)), y.to(here.device))
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
