"""The program of exercise 08.1: find the rank that went on without the other."""

import os

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

seed, rank = int(os.environ.get("DDPKIT_SEED", "0")), int(os.environ["RANK"])
# What each host's administrator has written down; the second host was rebuilt since.
first_choice = ["lo", "lo"]
first_choice[seed % 2] = "ib7"


def connect():
    for interface in (first_choice[rank], "lo"):
        print(f"connecting over {interface}")
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        try:
            dist.init_process_group("gloo")
        except RuntimeError:
            continue
        return


connect()
torch.manual_seed(seed)
ddp = DDP(nn.Linear(12, 1))
for _ in range(4):
    ddp(torch.randn(8, 12)).sum().backward()
dist.destroy_process_group()
