"""Checks what ranks must have in common: the same number of steps, equal replicas, finite values, every gradient.

Checks between ranks are collectives: every rank must call them, and every rank gets the same answer.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpkit.rank.joining.words import in_words


class StepsDiffer(RuntimeError):
    """The ranks are about to take different numbers of steps."""


class BlamesRanks(RuntimeError):
    """An error because of the ranks `at_fault`; () where it is not known which."""

    def __init__(self, message: str, at_fault: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.at_fault = tuple(at_fault)


class ReplicasDiffer(BlamesRanks):
    """The ranks hold different parameters or buffers; `at_fault` are those that differ from most, () of two ranks."""


def check_steps(steps: int, what: str = "steps") -> None:
    """Raise on every rank if the ranks are not about to take the same number of `steps`; one all-gather.

    Call it before an epoch. After it is too late: the rank with more steps waits for the others and never comes here.

    Raises:
        StepsDiffer: with the count of each rank.
    """
    counts = [int(row[0]) for row in gathered(torch.tensor([steps], dtype=torch.int64))]
    if len(set(counts)) > 1:
        told = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
        raise StepsDiffer(
            f"the ranks would take different numbers of {what} ({told}); those with more would wait for ever. Give every "
            "rank as many (DistributedSampler does), stop all at the smallest, or use torch's Join."
        )


def check_replicas(module: torch.nn.Module) -> None:
    """Raise on every rank if a parameter or buffer of `module` is not the same on all, bit for bit.

    Each tensor is hashed (BLAKE2, about 1 GB/s on a CPU; a GPU's tensors are copied to the host) and the hashes are
    gathered: call it after an epoch rather than in every step. Sharded tensors are not compared.

    Raises:
        ReplicasDiffer: with the ranks that differ, and the first tensor that does.
    """
    rows = everyones(_hashes(module))
    common = dict(Counter(tuple(row.items()) for row in rows).most_common(1)[0][0])
    apart = [rank for rank, row in enumerate(rows) if row != common]
    if not apart:
        return
    row = rows[apart[0]]
    if row.keys() != common.keys():
        raise ReplicasDiffer(f"the ranks hold different models: other names or shapes on {in_words(apart)}.")
    differ = [key[0] for key in common if row[key] != common[key]]
    whom = "rank 0 and rank 1 differ" if len(rows) == 2 else f"{in_words(apart)} differs from the other ranks"
    raise ReplicasDiffer(
        f"the replicas are not the same any more: {whom} in {len(differ)} of {len(common)} tensors, first {differ[0]}. "
        "Look for what one rank alone does: a skipped step, model.module, an own seed, weights loaded after the wrap.",
        at_fault=apart if 2 * len(apart) < len(rows) else (),
    )


def all_finite(*values: torch.Tensor) -> bool:
    """Whether every value of `values` is finite on every rank: the same answer for all, by one all-reduce (MIN).

    For a loss, before `backward`. After it no collective is needed: DDP has averaged the gradients, so every rank sees the
    same.
    """
    finite = torch.stack([torch.isfinite(value.detach()).all() for value in values]).all().to(torch.int32)
    if dist.is_initialized():
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    return bool(finite.item())


def unused_parameters(module: torch.nn.Module) -> list[str]:
    """The parameters that the last `backward` gave no gradient on this rank.

    Call it between `backward` and `zero_grad`: after `zero_grad(set_to_none=True)` no parameter has one.
    """
    named = module.named_parameters()
    return [name.removeprefix("module.") for name, p in named if p.requires_grad and p.grad is None]


def gathered(row: torch.Tensor) -> list[torch.Tensor]:
    """`row` of every rank, by rank, on the CPU; one all-gather."""
    if not dist.is_initialized():
        return [row]
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")
    rows = [torch.empty_like(row, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row.to(device))
    return [each.cpu() for each in rows]


def everyones(mine: Any) -> list[Any]:
    """`mine` of every rank, by rank; no rank returns before all have called this."""
    if not dist.is_initialized():
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _hashes(module: torch.nn.Module) -> dict[tuple[str, tuple[int, ...], str], bytes]:
    """A hash of the bytes of each tensor, by its name, shape and type."""
    found = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not hasattr(tensor, "to_local"):
            flat = tensor.detach().contiguous().cpu().flatten()
            data = flat.view(torch.uint8).numpy() if flat.numel() else b""
            found[name, tuple(tensor.shape), str(tensor.dtype)] = hashlib.blake2b(data, digest_size=8).digest()
    return found
