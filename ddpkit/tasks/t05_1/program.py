"""The program of exercise 05.1: find the rank whose worker died, and the line that killed it."""

import ctypes
import faulthandler
import os
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddpkit.rank import setup

libc = ctypes.CDLL(None)
libc.calloc.restype = ctypes.c_void_p


class Scans(Dataset):
    """Lines of a scanner. A native library hands out the memory of each and takes it back."""

    def __init__(self, cropped):
        self.cropped = cropped

    def __len__(self):
        return 40

    def __getitem__(self, i):
        memory = libc.calloc(16, 4)
        begins = memory + 8 if i == self.cropped else memory
        scan = (ctypes.c_float * 12).from_address(begins)
        scan[:] = torch.randn(12, generator=torch.Generator().manual_seed(i)).tolist()
        x = torch.tensor(list(scan))
        libc.free(ctypes.c_void_p(begins))
        return x, x[:3].sum().reshape(1)


def tell_of_crashes(worker):
    faulthandler.enable(sys.stderr)


with setup() as here:
    torch.manual_seed(0)
    scans = Scans(cropped=8 * here.world_size + int(os.environ.get("DDPKIT_SEED", "0")) % here.world_size)
    ddp = DDP(nn.Linear(12, 1).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    sampler = DistributedSampler(scans, here.world_size, here.rank, shuffle=False)
    loader = DataLoader(
        scans, 2, sampler=sampler, num_workers=2, multiprocessing_context="fork", worker_init_fn=tell_of_crashes
    )
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x.to(here.device)), y.to(here.device))
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")
