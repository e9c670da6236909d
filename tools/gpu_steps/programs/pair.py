"""Plain torch on one GPU without ddpkit: the ranks do what the first argument names, the last of them otherwise than the rest.

`HOST_PER_RANK=1` has NCCL take each rank for a host of its own. In the dry run the ranks use gloo.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LAST = RANKS - 1
GPU = os.environ.get("GPU_DAY_DRY") != "1"
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")


def healthy() -> None:
    """Each kind of communication, and three steps of DDP; the time of an all-reduce of 1 MiB."""
    ones = torch.ones(1 << 18, device=DEVICE)
    took_ms = []
    for _ in range(20):
        began = time.perf_counter()
        dist.all_reduce(ones)
        synchronise()
        took_ms.append(1000 * (time.perf_counter() - began))
        ones.fill_(1)
    gathered = [torch.empty(1, device=DEVICE) for _ in range(RANKS)]
    dist.all_gather(gathered, torch.tensor([float(RANK)], device=DEVICE))
    assert [each.item() for each in gathered] == list(range(RANKS))
    dist.barrier()
    if RANK == 0:
        dist.send(torch.ones(1, device=DEVICE), LAST)
    if RANK == LAST:
        dist.recv(torch.empty(1, device=DEVICE), 0)
    train(3)
    if RANK == 0:
        print(json.dumps({"all_reduce_ms": round(statistics.median(took_ms), 3), "worst_ms": round(max(took_ms), 3)}))


def train(steps: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(64, 64).to(DEVICE))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(8, 64, device=DEVICE)).square().mean().backward()
        optimizer.step()
    synchronise()


def skipped() -> None:
    """The last rank never comes to the all-reduce."""
    if RANK == LAST:
        time.sleep(300)
    all_reduce(4)


def sizes() -> None:
    """The last rank brings twice as many elements, few of them."""
    print(f"4 elements meet 8: the sum is {all_reduce(8 if RANK == LAST else 4)}", flush=True)


def large_sizes() -> None:
    """The same with a million."""
    print(f"1 million meet 2 million: the sum is {all_reduce(1 << (21 if RANK == LAST else 20))}", flush=True)


def killed() -> None:
    """The last rank is killed while the others wait for it."""
    if RANK == LAST:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(4)


def raises() -> None:
    """The last rank raises, and stays while it cleans up, so that both have time to write down what they know."""
    if RANK == LAST:
        try:
            raise KeyError("label 9")
        finally:
            time.sleep(30)
    all_reduce(4)


def all_reduce(size: int) -> float:
    ones = torch.ones(size, device=DEVICE)
    dist.all_reduce(ones)
    return ones.sum().item()


def synchronise() -> None:
    if GPU:
        torch.cuda.synchronize()


def main() -> None:
    if os.environ.get("HOST_PER_RANK") == "1":
        os.environ["NCCL_HOSTID"] = f"rank{RANK}"
    if GPU:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if GPU else "gloo", timeout=timedelta(seconds=60), device_id=DEVICE if GPU else None)
    all_reduce(1)
    if limit_s := os.environ.get("TIMEOUT_S"):
        # For what comes from here on: the start was given time.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=float(limit_s)))
    CASES[sys.argv[1]]()
    dist.destroy_process_group()


CASES = {case.__name__: case for case in (healthy, skipped, sizes, large_sizes, killed, raises)}

if __name__ == "__main__":
    main()
