"""Trains four steps with the answer under a budget, and compares with one process that has memory enough."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import memory_budget, setup

BUDGET_MIB, STEPS, POINTS = 34, 4, 1024
# A peak is read from the system's own counts, which are a little coarse.
SLACK_MIB = 2


class Surface(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))

    def forward(self, points):
        return self.layers(points).mean(dim=1)


def call(answer, seed):
    with setup("gloo") as here:
        budget = memory_budget(BUDGET_MIB)
        torch.manual_seed(seed)
        net, samples = Surface(), 7 + 2 * (seed % 2)
        alone = copy.deepcopy(net)
        inputs = torch.randn(STEPS, here.world_size, samples, POINTS, 3)
        targets = torch.randn(STEPS, here.world_size, samples, 1)
        ddp, reduced = DDP(net), _counted()
        ddp.register_comm_hook(None, allreduce_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for step in range(STEPS):
            answer(ddp, optimizer, inputs[step, here.rank], targets[step, here.rank])
        peak_mib = budget.peak_mib()
        times = sum(reduced) / sum(p.numel() for p in net.parameters())
        swallows = _swallows(answer, ddp, optimizer, inputs[0, here.rank], targets[0, here.rank])
        budget.lift()
        _train_alone(alone, inputs.flatten(1, 2), targets.flatten(1, 2))
        off = max((p - q).abs().max().item() for p, q in zip(net.parameters(), alone.parameters(), strict=True))
        return {"peak_mib": peak_mib, "off": off, "times": times, "swallows": swallows}


def _counted():
    """A list that holds, from here on, how many values each all-reduce has; DDP's own are among them."""
    counts, whole = [], dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        counts.append(tensor.numel())
        return whole(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    return counts


def _swallows(answer, ddp, optimizer, x, y):
    def fail(module, inputs):
        raise RuntimeError("a fault that has nothing to do with memory")

    with torch.no_grad():
        before = [p.clone() for p in ddp.module.parameters()]
    hook = ddp.module.register_forward_pre_hook(fail)
    try:
        answer(ddp, optimizer, x, y)
    except Exception:
        return False
    finally:
        hook.remove()
        with torch.no_grad():
            for p, q in zip(ddp.module.parameters(), before, strict=True):
                p.copy_(q)
    return True


def _train_alone(net, inputs, targets):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()


def judge(returned, seed):
    ranks = returned.values()
    if any(r["swallows"] for r in ranks):
        look = "what catches exceptions in your function: a fault it did not expect must end the job"
        return "an exception in the forward that nobody heard of", "that exception", look
    if any(r["peak_mib"] > BUDGET_MIB + SLACK_MIB for r in ranks):
        return f"more than {BUDGET_MIB} MiB", f"a peak within {BUDGET_MIB} MiB", "who changed the budget"
    off = max(r["off"] for r in ranks)
    if not off < 1e-5:
        wanted = "what one process computes from the whole batch"
        return f"parameters {off:.2g} off", wanted, "which samples count, and how much each part weighs"
    times = round(max(r["times"] for r in ranks))
    if times != STEPS:
        look = "ddp.no_sync(), for all parts but the last"
        return f"gradients reduced {times} times in {STEPS} steps", "once in each step", look
    return None
