"""Divides batches among the ranks by the answer, and compares the gradient that DDP then has with that of the whole batch."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

SAMPLES = (12, 7, 4)


def call(answer, seed):
    with setup("gloo") as here:
        torch.manual_seed(seed)
        net = nn.Linear(6, 1)
        ddp, told = DDP(net), []
        for samples in SAMPLES:
            batch = torch.randn(samples, 6)
            ddp.zero_grad()
            mine, weight = answer(batch, here.rank, here.world_size)
            (weight * loss_of(ddp, mine)).backward()
            got = net.weight.grad.clone()
            told.append({"ranks": here.world_size, "samples": samples, "off": off(net, batch, got)})
        for ranks in (1, 3):
            batch, got = torch.randn(7, 6), 0
            for rank in range(ranks):
                mine, weight = answer(batch, rank, ranks)
                got = got + torch.autograd.grad(weight * loss_of(net, mine), net.weight)[0] / ranks
            told.append({"ranks": ranks, "samples": 7, "off": off(net, batch, got)})
        return told


def loss_of(net, samples):
    return nn.functional.mse_loss(net(samples), samples.sum(1, keepdim=True))


def off(net, batch, got):
    """How far a gradient is from that of the whole batch."""
    whole = torch.autograd.grad(loss_of(net, batch), net.weight)[0]
    return (got - whole).abs().max().item()


def judge(returned, seed):
    for told in returned[0]:
        if not told["off"] < 1e-5:
            where = f"{told['samples']} samples on {told['ranks']} ranks"
            got = f"a gradient that is {told['off']:.2g} off, with {where}"
            look = "whether each sample is in one part alone, and what the mean over ranks makes of a smaller part"
            return got, "the gradient of the mean loss of the whole batch", look
    return None
