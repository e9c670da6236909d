"""What `safe_loader` (in `loader.py`) was asked for, checked; and the defaults that depend on the machine and the job."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset

from ddpkit.rank.joining.process_group import Here

MOST_WORKERS = 8


@dataclass(frozen=True)
class Plan:
    """The arguments of `safe_loader`, with its defaults filled in."""

    dataset: Any
    sampler: Any
    even: bool
    batch_size: int
    drop_last: bool
    seed: int
    num_workers: int
    timeout_s: float | None
    retries: int
    multiprocessing_context: str | None
    pin_memory: bool
    collate: Callable[[list[Any]], Any]
    here: Here

    def __post_init__(self) -> None:
        size, count, timeout_s, way = self.batch_size, self.num_workers, self.timeout_s, self.multiprocessing_context
        ways = multiprocessing.get_all_start_methods()
        for wrong, said in (
            (size < 1, f"batch_size={size} asked for; it is the number of samples per batch and rank."),
            (count < 0, f"num_workers={count} asked for; use 0 to load in the rank itself, None for the default."),
            (
                timeout_s is not None and timeout_s <= 0,
                f"timeout_s={timeout_s} asked for; give seconds, or None to wait for ever.",
            ),
            (self.retries < 0, f"retries={self.retries} asked for; use 0 to fail at the first death of a worker."),
            (
                way is not None and way not in ways,
                f'multiprocessing_context="{way}" asked for; this system has {", ".join(ways)}.',
            ),
        ):
            if wrong:
                raise ValueError(f"safe_loader: {said}")


def sampler_for(
    dataset: Any, here: Here, shuffle: bool | None, even: bool, sampler: Any, seed: int, drop_last: bool
) -> Any:
    """This rank's indices, as `safe_loader` describes them."""
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            "safe_loader: an IterableDataset given; its samples have no numbers by which ranks could share them. "
            "Use a map-style dataset, or torch's own DataLoader."
        )
    if not even and (shuffle or sampler is not None):
        raise ValueError(
            "safe_loader: even=False gives rank r the samples r, r + world size, ... in that order; "
            "leave out shuffle= and sampler=."
        )
    if sampler is not None and shuffle:
        raise ValueError(
            "safe_loader: shuffle=True and a sampler= asked for; the sampler has the order, leave out shuffle=."
        )
    if sampler is not None:
        return sampler
    if not even:
        return range(here.rank, len(dataset), here.world_size)
    return DistributedSampler(dataset, here.world_size, here.rank, shuffle is not False, seed, drop_last)


def default_workers(local_ranks: int) -> int:
    """Workers for each of `local_ranks` ranks of this host: its share of the cores, less one for the rank itself."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(MOST_WORKERS, cores // local_ranks - 1))


def default_context(on_gpu: bool) -> str | None:
    """See `safe_loader`; None is Python's own default."""
    if sys.platform != "linux":
        return None
    return "forkserver" if on_gpu else "fork"


def found_here() -> Here:
    """What `setup()` would have given: torch.distributed tells it, else there is one rank. The store is this rank's own."""
    rank, world_size = 0, 1
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if dist.is_initialized():
        rank, world_size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    device = torch.device("cuda" if "nccl" in backend else "cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return Here(rank, local_rank, world_size, local_world_size, backend, device, dist.HashStore())
