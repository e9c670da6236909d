"""A data file is truncated while workers have it mapped."""

import tempfile

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddpkit.rank import setup


class Rows(Dataset):
    def __init__(self, path):
        self.rows = np.memmap(path, np.float32, "r", shape=(96, 1024))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        x = torch.tensor(self.rows[i])
        return x, x[:4].sum().reshape(1)


with setup() as here, tempfile.TemporaryDirectory() as folder:
    torch.manual_seed(0)
    path = f"{folder}/rows.bin"
    rows = torch.randn(96, 1024).numpy()
    rows.tofile(path)
    ddp = DDP(nn.Linear(1024, 1).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    data = Rows(path)
    sampler = DistributedSampler(data, here.world_size, here.rank, shuffle=False)
    loader = DataLoader(data, 8 // here.world_size, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x.to(here.device)), y.to(here.device))
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
        if here.rank == 1 and step == 2:
            export = open(path, "wb")  # Rank 1 writes its rows out anew, a part after each step.
        if here.rank == 1 and step >= 2:
            export.write(rows[step].tobytes())
