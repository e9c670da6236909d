"""Evaluates a model with the answer, on data that do not divide by the number of ranks, and compares with the mean of all."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


def call(answer, seed):
    with setup("gloo"):
        torch.manual_seed(seed)
        ddp = DDP(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()).eval()
        told = {}
        # Fewer samples than ranks, a sample too many, and batches whose last one is short.
        for count in (1, 9 + 2 * (seed % 3), 20 + seed % 3):
            inputs, targets = torch.randn(count, 6).double(), 3 * torch.randn(count, 1).double()
            seen, group = [], dist.distributed_c10d._get_default_group()
            hook = ddp.module.register_forward_pre_hook(lambda module, given, seen=seen: seen.append(len(given[0])))
            before = group._get_sequence_number_for_group()
            mean = float(answer(ddp, inputs, targets))
            calls = group._get_sequence_number_for_group() - before
            hook.remove()
            truth = nn.functional.mse_loss(ddp.module(inputs), targets).item()
            told[count] = {"off": abs(mean - truth), "seen": sum(seen), "calls": calls}
        return {"told": told, "swallows": _swallows(answer, ddp, inputs, targets)}


def _swallows(answer, ddp, inputs, targets):
    def fail(module, given):
        raise RuntimeError("a fault that has nothing to do with numbers")

    hook = ddp.module.register_forward_pre_hook(fail)
    try:
        answer(ddp, inputs, targets)
    except Exception:
        return False
    finally:
        hook.remove()
    return True


def judge(returned, seed):
    ranks = list(returned.values())
    if any(r["swallows"] for r in ranks):
        look = "what catches exceptions in your function: a fault it did not expect must end the job"
        return "an exception in the forward that nobody heard of", "that exception", look
    for count in ranks[0]["told"]:
        told = [r["told"][count] for r in ranks]
        if (seen := sum(t["seen"] for t in told)) != count:
            return (
                f"{seen} samples in the forwards of all ranks, of {count}",
                "each sample once",
                "who takes which samples",
            )
        if not (off := max(t["off"] for t in told)) < 1e-6:
            look = "what is added up over the ranks, and what it is divided by"
            return f"{off:.2g} off the mean over {count} samples", "that mean, on every rank", look
        if (calls := max(t["calls"] for t in told)) > 2:
            return f"{calls} collectives for {count} samples", "at most 2", "how many numbers one all_reduce can carry"
    return None
