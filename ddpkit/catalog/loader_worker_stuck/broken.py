"""A worker of rank 1 waits for an answer that never comes."""

import socket

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddpkit.rank import setup


def stored(i):
    return torch.randn(16, generator=torch.Generator().manual_seed(i)).numpy().tobytes()


def fetch(i):
    """Ask the file server for a sample. For one of them it does not answer."""
    client, server = socket.socketpair()
    if i != 21:
        server.sendall(stored(i))
    return client.recv(64)


class Samples(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        x = torch.frombuffer(bytearray(fetch(i)), dtype=torch.float32)
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
