"""What `safe_loader` (in `loader.py`) was asked for: checked, and what was left open filled in from the machine and the job."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset, default_collate

if TYPE_CHECKING:
    from ddpkit.rank.joining.process_group import Here

MOST_WORKERS = 8


@dataclass(frozen=True)
class Place:
    """Where this rank stands; `store` is shared by all ranks, None where there is none."""

    rank: int
    world_size: int
    local_world_size: int
    on_gpu: bool
    store: Any = None


@dataclass(frozen=True)
class Plan:
    """A loader to be made. `sampler` is None for an IterableDataset; `deals` where its samples are dealt out by seed."""

    dataset: Any
    sampler: Any
    deals: bool
    even: bool
    batch_size: int
    drop_last: bool
    seed: int
    num_workers: int
    timeout_s: float | None
    retries: int
    multiprocessing_context: str | None
    pin_memory: bool
    prefetch_factor: int
    collate: Callable[[list[Any]], Any]
    place: Place


def made(
    dataset: Any,
    *,
    here: Here | None,
    shuffle: bool | None,
    even: bool,
    sampler: Any,
    num_workers: int | None,
    multiprocessing_context: str | None,
    pin_memory: bool | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    **numbers: Any,
) -> Plan:
    """The plan for these arguments of `safe_loader`, with the defaults that its docstring names.

    Raises:
        ValueError: an argument cannot be, or goes not with another.
    """
    iterable = isinstance(dataset, IterableDataset)
    _check_numbers(num_workers=num_workers, **numbers)
    _check_context(multiprocessing_context)
    _check_order(iterable, shuffle, even, sampler, numbers["retries"])
    place = _place(here)
    deals = not iterable and sampler is None
    if deals:
        shuffle = even if shuffle is None else shuffle
        sampler = _sampler(dataset, place, even, shuffle, numbers["seed"], numbers["drop_last"])
    return Plan(
        dataset=dataset,
        sampler=sampler,
        deals=deals,
        even=even,
        num_workers=default_workers(place.local_world_size) if num_workers is None else num_workers,
        multiprocessing_context=multiprocessing_context or default_context(place.on_gpu),
        pin_memory=place.on_gpu if pin_memory is None else pin_memory,
        collate=collate_fn or default_collate,
        place=place,
        **numbers,
    )


def default_workers(local_ranks: int) -> int:
    """Workers for each of `local_ranks` ranks of this host: its share of the cores, less one for the rank itself."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(MOST_WORKERS, cores // local_ranks - 1))


def default_context(on_gpu: bool) -> str | None:
    """See `safe_loader`; None is Python's own default."""
    if sys.platform != "linux":
        return None
    return "forkserver" if on_gpu else "fork"


def _place(here: Here | None) -> Place:
    if here is not None:
        on_gpu = here.device.type == "cuda"
        return Place(here.rank, here.world_size, here.local_world_size, on_gpu, getattr(here, "store", None))
    if dist.is_available() and dist.is_initialized():
        world_size = dist.get_world_size()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        return Place(dist.get_rank(), world_size, local, "nccl" in dist.get_backend())
    return Place(0, 1, 1, torch.cuda.is_available())


def _sampler(dataset: Any, place: Place, even: bool, shuffle: bool, seed: int, drop_last: bool) -> Any:
    """Which samples are this rank's."""
    if not even:
        return range(place.rank, len(dataset), place.world_size)
    return DistributedSampler(dataset, place.world_size, place.rank, shuffle, seed, drop_last)


def _check_numbers(
    *,
    num_workers: int | None,
    batch_size: int,
    prefetch_factor: int,
    retries: int,
    timeout_s: float | None,
    seed: int,
    drop_last: bool,
) -> None:
    if batch_size < 1:
        raise ValueError(
            f"safe_loader: batch_size={batch_size} asked for; it is the number of samples per batch and rank."
        )
    if num_workers is not None and num_workers < 0:
        raise ValueError(
            f"safe_loader: num_workers={num_workers} asked for; use 0 to load in the rank itself, None for the default."
        )
    if prefetch_factor < 1:
        raise ValueError(
            f"safe_loader: prefetch_factor={prefetch_factor} asked for; each worker loads at least 1 batch ahead."
        )
    if timeout_s is not None and timeout_s <= 0:
        raise ValueError(f"safe_loader: timeout_s={timeout_s:g} asked for; give seconds, or None to wait for ever.")
    if retries < 0:
        raise ValueError(f"safe_loader: retries={retries} asked for; use 0 to fail at the first death of a worker.")


def _check_context(name: str | None) -> None:
    ways = multiprocessing.get_all_start_methods()
    if name is not None and name not in ways:
        raise ValueError(f'safe_loader: multiprocessing_context="{name}" asked for; this system has {", ".join(ways)}.')


def _check_order(iterable: bool, shuffle: bool | None, even: bool, sampler: Any, retries: int) -> None:
    if iterable and (shuffle or sampler is not None):
        raise ValueError("safe_loader: an IterableDataset has its own order; leave out shuffle= and sampler=.")
    if iterable and retries:
        raise ValueError(
            f"safe_loader: retries={retries} asked for, but with fewer workers an IterableDataset gives other batches; "
            "use a map-style dataset, or retries=0."
        )
    if sampler is not None and shuffle:
        raise ValueError(
            "safe_loader: shuffle=True and a sampler= asked for; the sampler has the order, leave out shuffle=."
        )
    if not even and (shuffle or sampler is not None):
        raise ValueError(
            "safe_loader: even=False gives rank r the samples r, r + world size, ... in that order; "
            "leave out shuffle= and sampler=."
        )
