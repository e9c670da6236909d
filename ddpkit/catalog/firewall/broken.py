"""A firewall between two hosts drops what goes to the ports of the process group."""

import ctypes
import os
import subprocess
from datetime import timedelta

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def own_host(rank, store):
    """Give this process a host of its own, with one cable to the other rank's: its eth0 is 10.0.0.1 or 10.0.0.2."""
    assert ctypes.CDLL(None).unshare(0x40000000) == 0, "a network namespace needs root"
    store.set(f"host of {rank}", str(os.getpid()))
    if rank == 0:
        run(f"ip link add eth0 type veth peer name eth0 netns {store.get('host of 1').decode()}")
        store.set("cable", "in")
    store.wait(["cable"])
    run(f"ip addr add 10.0.0.{rank + 1}/24 dev eth0; ip link set eth0 up; ip link set lo up")


def firewall(rules):
    """Ask `rules` about each packet that arrives, before the kernel takes it for this host."""
    run("ip rule add pref 100 lookup local; ip rule del pref 0")
    run("; ".join(f"ip rule add pref {10 + i} iif eth0 {rule}" for i, rule in enumerate(rules)))


def run(commands):
    subprocess.run(commands, shell=True, check=True)


store, rank, ranks = next(dist.rendezvous("env://"))
own_host(rank, store)
if rank == 1:
    firewall(["ipproto tcp dport 29500 lookup local", "ipproto tcp blackhole"])
os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=2))
torch.manual_seed(0)
inputs, targets = torch.randn(6, 8, 16), torch.randn(6, 8, 1)
ddp = DDP(nn.Linear(16, 1))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(6):
    loss = nn.functional.mse_loss(ddp(inputs[step].chunk(ranks)[rank]), targets[step].chunk(ranks)[rank])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.2f}")
dist.destroy_process_group()
