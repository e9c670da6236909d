"""What ranks must have in common, asked before it hurts: as many steps, equal replicas, finite values, every gradient.

Each question is a function of its own. Those that ask the other ranks take one collective, and give every rank the same answer.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

# So many digests go into the one collective of `check_replicas`; a model of more tensors shares them.
SLOTS = 4096


class StepsDiffer(RuntimeError):
    """The ranks are about to take different numbers of steps."""


class ReplicasDiffer(RuntimeError):
    """The ranks no longer hold the same parameters or buffers; `at_fault` are those that differ from most, () of two ranks."""

    def __init__(self, message: str, at_fault: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.at_fault = tuple(at_fault)


def check_steps(steps: int, what: str = "steps") -> None:
    """Raise on every rank when the ranks are not about to take the same number of `steps`; one all-gather of an integer.

    Asked before an epoch it fails fast; asked after it, it is never reached: the rank with more steps waits for the others.

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
    """Raise on every rank when parameters or buffers of `module` are not bit for bit the same on all; one all-gather, 32 KiB.

    Each tensor is hashed where it is (BLAKE2, about 1 GB/s on a CPU; a GPU's tensors are copied to the host), so this is
    for the end of an epoch rather than for every step. Of a sharded tensor nothing is compared: each rank holds another part.

    Raises:
        ReplicasDiffer: with the ranks that differ, and the first tensor that does.
    """
    names, digests = _digests(module)
    rows = gathered(digests)
    common = Counter(tuple(row.tolist()) for row in rows).most_common(1)[0][0]
    apart = [rank for rank, row in enumerate(rows) if tuple(row.tolist()) != common]
    if not apart:
        return
    row = rows[apart[0]].tolist()
    if row[0] != common[0]:
        raise ReplicasDiffer(f"the ranks hold different models: other names or shapes on {ranks_in_words(apart)}.")
    slots = [slot for slot in range(1, SLOTS + 1) if row[slot] != common[slot]]
    first = next(name for i, name in enumerate(names) if 1 + i % SLOTS == slots[0])
    whom = "rank 0 and rank 1 differ" if len(rows) == 2 else f"{ranks_in_words(apart)} differs from the other ranks"
    raise ReplicasDiffer(
        f"the replicas are not the same any more: {whom} in {len(slots)} of {len(names)} tensors, first {first}. "
        "Look for what one rank alone does: a skipped step, model.module, an own seed, weights loaded after the wrap.",
        at_fault=apart if 2 * len(apart) < len(rows) else (),
    )


def all_finite(*values: torch.Tensor) -> bool:
    """Whether every value of `values` is finite on every rank: the same answer for all, by one all-reduce (MIN).

    For a loss, before `backward`. After it no collective is needed: the gradients that DDP has averaged are the same on
    every rank, so each finds by itself what the others find.
    """
    finite = torch.stack([torch.isfinite(value.detach()).all() for value in values]).all().to(torch.int32)
    if dist.is_initialized():
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    return bool(finite.item())


def unused_parameters(module: torch.nn.Module) -> list[str]:
    """Names of the parameters that the last `backward` gave no gradient on this rank, without a debug build.

    Asked between `backward` and `zero_grad`; after `zero_grad(set_to_none=True)` none has one.
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


def _digests(module: torch.nn.Module) -> tuple[list[str], torch.Tensor]:
    """Names of the tensors, and 1 + SLOTS integers: a digest of names and shapes, then one of each tensor's bytes."""
    whole = {n: t for n, t in _named_tensors(module) if not hasattr(t, "to_local")}
    slots = [_number(str([(name, tuple(t.shape), t.dtype) for name, t in whole.items()]).encode())] + [0] * SLOTS
    for i, tensor in enumerate(whole.values()):
        flat = tensor.detach().contiguous().cpu().flatten()
        slots[1 + i % SLOTS] ^= _number(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    return list(whole), torch.tensor(slots, dtype=torch.int64)


def _named_tensors(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def ranks_in_words(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
