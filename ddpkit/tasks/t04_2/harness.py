"""Trains four windows with the answer, uneven in number and size, and compares with one process that has them all."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector

from ddpkit.rank import setup

WINDOWS = 4


def window_of(number, rank, seed):
    """The micro-batches of one rank: from two to four of them, each of one to five samples."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * number + rank)
    count = 2 + (number + 2 * rank + seed) % 3
    sizes = torch.randint(1, 6, (count,), generator=generator).tolist()
    micro_batches = []
    for size in sizes:
        rows = torch.randn(size, 9, generator=generator)
        micro_batches.append((rows[:, :8], rows[:, 8:] + rank))
    return micro_batches


def call(answer, seed):
    with setup("gloo") as here:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        alone, ddp, reduced = copy.deepcopy(net), DDP(net), _counted()
        ddp.register_comm_hook(None, allreduce_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for number in range(WINDOWS):
            answer(ddp, optimizer, window_of(number, here.rank, seed))
        times = sum(reduced) / parameters_to_vector(net.parameters()).numel()
        swallows = _swallows(answer, ddp, optimizer, window_of(0, here.rank, seed))
        _train_alone(alone, here.world_size, seed)
        off = parameters_to_vector(net.parameters()) - parameters_to_vector(alone.parameters())
        return {"off": off.abs().max().item(), "times": times, "swallows": swallows}


def _counted():
    """A list that holds, from here on, how many values each all-reduce has; DDP's own are among them."""
    counts, whole = [], dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        counts.append(tensor.numel())
        return whole(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    return counts


def _swallows(answer, ddp, optimizer, micro_batches):
    def fail(module, inputs):
        raise RuntimeError("a fault that was not expected")

    before = copy.deepcopy(ddp.module.state_dict())
    hook = ddp.module.register_forward_pre_hook(fail)
    try:
        answer(ddp, optimizer, micro_batches)
    except Exception:
        return False
    finally:
        hook.remove()
        ddp.module.load_state_dict(before)
    return True


def _train_alone(net, ranks, seed):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for number in range(WINDOWS):
        everything = []
        for rank in range(ranks):
            everything += window_of(number, rank, seed)
        x, y = zip(*everything, strict=True)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(torch.cat(x)), torch.cat(y)).backward()
        optimizer.step()


def judge(returned, seed):
    ranks = returned.values()
    if any(r["swallows"] for r in ranks):
        look = "what catches exceptions in your function: a fault it did not expect must end the job"
        return "an exception in the forward that nobody heard of", "that exception", look
    off = max(r["off"] for r in ranks)
    if not off < 1e-5:
        wanted = "what one process computes from all samples of a window"
        look = "what a sample weighs, and which gradients are there before the window"
        return f"parameters {off:.2g} off", wanted, look
    times = round(max(r["times"] for r in ranks))
    if times != WINDOWS:
        look = "ddp.no_sync(), for all micro-batches but the last"
        return f"gradients reduced {times} times in {WINDOWS} windows", "once in each window", look
    return None
