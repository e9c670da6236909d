"""A script of torch.distributed.launch, which wants --local_rank, is started by torchrun, which sets LOCAL_RANK."""

import argparse

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddpkit.rank import setup

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, required=True)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(16, 1).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=args.lr)
    data = TensorDataset(torch.randn(32, 16), torch.randn(32, 1))
    sampler = DistributedSampler(data, here.world_size, args.local_rank, shuffle=False)
    for x, y in DataLoader(data, batch_size=8 // here.world_size, sampler=sampler):
        loss = nn.functional.mse_loss(ddp(x.to(here.device)), y.to(here.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
