"""Trains eight steps with the answer, of which two must be left out, and compares with one process that leaves them out."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

STEPS, LEFT_OUT = 8, (2, 5)


class Length(nn.Module):
    """The length of a vector. Where it is 0 it has no gradient: the loss is finite, and the backward gives nan."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Linear(6, 4, bias=False)

    def forward(self, x):
        return self.turned(x).square().sum(1).sqrt()


def call(answer, seed):
    with setup("gloo") as here:
        torch.manual_seed(seed)
        net = Length().double()
        inputs = torch.randn(STEPS, here.world_size, 5, 6, dtype=torch.float64)
        targets = torch.rand(STEPS, here.world_size, 5, dtype=torch.float64)
        alone, plain = copy.deepcopy(net), _trained(DDP(copy.deepcopy(net)), inputs, targets, here, _plain_step)
        inputs[LEFT_OUT[0], seed % here.world_size, 1, 3] = torch.nan
        inputs[LEFT_OUT[1], (seed + 1) % here.world_size, 2] = 0.0
        ddp = DDP(net)
        called = _trained(ddp, inputs, targets, here, answer)
        swallows = _swallows(answer, ddp, inputs[0, here.rank], targets[0, here.rank])
        _train_alone(alone, inputs.flatten(1, 2), targets.flatten(1, 2))
        off = (net.turned.weight - alone.turned.weight).abs().max().item()
        return {"off": off, "more": called - plain, "swallows": swallows}


def _trained(ddp, inputs, targets, here, step):
    """Train with `step`; how many collectives that took."""
    optimizer, group = torch.optim.AdamW(ddp.parameters(), lr=0.02), dist.distributed_c10d._get_default_group()
    before = group._get_sequence_number_for_group()
    for x, y in zip(inputs[:, here.rank], targets[:, here.rank], strict=True):
        step(ddp, optimizer, x, y)
    return group._get_sequence_number_for_group() - before


def _plain_step(ddp, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.mse_loss(ddp(x), y).backward()
    optimizer.step()


def _swallows(answer, ddp, x, y):
    def fail(module, inputs):
        raise RuntimeError("a fault that has nothing to do with numbers")

    before = copy.deepcopy(ddp.module.state_dict())
    hook = ddp.module.register_forward_pre_hook(fail)
    try:
        answer(ddp, torch.optim.AdamW(ddp.parameters(), lr=0.02), x, y)
    except Exception:
        return False
    finally:
        hook.remove()
        ddp.module.load_state_dict(before)
    return True


def _train_alone(net, inputs, targets):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    for step in range(STEPS):
        if step not in LEFT_OUT:
            _plain_step(net, optimizer, inputs[step], targets[step])


def judge(returned, seed):
    ranks = returned.values()
    if any(r["swallows"] for r in ranks):
        look = "what catches exceptions in your function: a fault it did not expect must end the job"
        return "an exception in the forward that nobody heard of", "that exception", look
    off = max(r["off"] for r in ranks)
    if not off < 1e-9:
        wanted = "the weights of one process that leaves those two steps out"
        look = "which values can be bad while the loss is fine, and what a step does to AdamW's states"
        return f"weights {off:.2g} off", wanted, look
    if (more := max(r["more"] for r in ranks)) > 0:
        return (
            f"{more} collectives more than a plain step takes",
            "none",
            "what all ranks hold alike after the backward",
        )
    return None
