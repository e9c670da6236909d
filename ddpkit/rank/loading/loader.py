"""`safe_loader`: this rank's batches, the same after a resumption or the death of a worker (`workers.py`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from ddpkit.rank.joining.process_group import Here

from .agreement import Retries, UnevenData, agree
from .batches import Fetch, Order, as_it_is, kept_randomness, seed_generators
from .plan import Plan, default_context, default_workers, found_here, sampler_for
from .workers import Position, WatchedLoader, WorkerDied, WorkerTimedOut

__all__ = ["SafeLoader", "UnevenData", "WorkerDied", "WorkerTimedOut", "safe_loader"]

logger = logging.getLogger("ddpkit.rank")
_end: Any = object()


def safe_loader(
    dataset: Any,
    batch_size: int,
    *,
    here: Here | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    num_workers: int | None = None,
    timeout_s: float | None = 120.0,
    retries: int = 0,
    even: bool = True,
    sampler: Any = None,
    drop_last: bool = False,
    multiprocessing_context: str | None = None,
    pin_memory: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> SafeLoader:
    """A loader of this rank's part of `dataset`: each `for batch in loader` is one epoch; `set_epoch` is not needed.

    A batch depends only on seed, rank, epoch and its number, random augmentation included: not on the number of workers,
    nor on where a pass began. The rank's own generators stay as they are. Every rank must begin each pass; with `even`, one
    all-gather then compares their numbers of batches.

    Args:
        dataset: map-style (`__len__`, and `__getitem__` or `__getitems__`).
        batch_size: samples per batch and rank.
        here: what `setup()` gave; without it torch.distributed is asked, and without that there is one rank.
        shuffle: another order each epoch; by default True if `even` and there is no `sampler`.
        seed: of order and augmentation, the same on every rank.
        num_workers: processes per rank; by default min(8, cores // ranks of this host - 1), and at least 0. Only the cores
            that this process may use count, and one is left to the rank itself.
        timeout_s: how long to wait for a worker's batch, less than the process group's timeout; None: for ever.
        retries: after a worker's death or silence, load on from the missing batch with half the workers (1 becomes 0), so
            often per epoch, on all ranks together. The other ranks halve their workers in the next epoch.
            `here.store` has the count; without it each rank counts for itself.
        even: DistributedSampler gives all ranks the same number of batches: it repeats a few samples, or leaves some out
            with `drop_last`. False, for evaluation: rank r has the samples r, r + world size, ..., each once; no collectives.
        sampler: your own: indices with a length. If it has `set_epoch`, that is called.
        drop_last: leave out the last batch if it is not full.
        multiprocessing_context: "fork", "spawn" or "forkserver". By default forkserver with a GPU, as DDP's documentation
            asks for with NCCL; else, on Linux, fork: its first batch comes after tenths of a second instead of seconds, and
            dataset and script need not be importable.
        pin_memory: by default True if this rank has a GPU.
        collate_fn: makes a batch from a list of samples; it may use random numbers too.

    Raises:
        ValueError: an argument cannot be, or excludes another.
        UnevenData: when a pass begins, on every rank.
        WorkerDied, WorkerTimedOut: while waiting for a batch, on the rank of that worker.
    """
    here = here or found_here()
    on_gpu = here.device.type == "cuda"
    planned = Plan(
        dataset=dataset,
        sampler=sampler_for(dataset, here, shuffle, even, sampler, seed, drop_last),
        even=even,
        batch_size=batch_size,
        drop_last=drop_last,
        seed=seed,
        num_workers=default_workers(here.local_world_size) if num_workers is None else num_workers,
        timeout_s=timeout_s,
        retries=retries,
        multiprocessing_context=multiprocessing_context or default_context(on_gpu),
        pin_memory=on_gpu if pin_memory is None else pin_memory,
        collate=collate_fn or default_collate,
        here=here,
    )
    loader = SafeLoader(planned)
    if even and sampler is None and not len(loader):
        raise ValueError(
            f"safe_loader: {len(dataset)} samples on {here.world_size} ranks in batches of {batch_size} "
            f"(drop_last={drop_last}) make no batch; take smaller batches, or more samples."
        )
    return loader


class SafeLoader:
    """What `safe_loader` returns. Each `for` is an epoch; leaving it early ends the epoch and the workers.

    A pass begins with its first `next`, which asks the other ranks.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._at = Position(plan.here.rank)
        self._order = Order(plan.batch_size, plan.drop_last)
        self._retries = Retries(plan.retries, plan.here.store)
        self._halvings = 0
        self._state: Literal["ready", "running", "left"] = "ready"
        self._passes = 0
        self._loader: WatchedLoader | None = None
        self._batches: Iterator[Any] | None = None

    @property
    def epoch(self) -> int:
        """The epoch under way, else the next one. Setting it begins that epoch with the next pass."""
        return self._at.epoch + (self._state == "left")

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.load_state_dict({"epoch": epoch, "batch": 0})

    @property
    def num_workers(self) -> int:
        """Worker processes of this rank now; each retry has halved them."""
        return self._plan.num_workers >> self._halvings

    def __len__(self) -> int:
        """Batches in a whole epoch on this rank."""
        return self._order.batches_in(len(self._plan.sampler))

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its batches were handed out; not those that workers have loaded ahead."""
        return {"epoch": self._at.epoch, "batch": self._at.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next pass where `state` was taken, on every rank.

        Raises:
            ValueError: `state` does not have that form.
        """
        if set(state) != {"epoch", "batch"} or min(state.values()) < 0:
            raise ValueError(f"load_state_dict: {state} is no loader's state; it has the numbers epoch and batch.")
        self._at.epoch, self._at.batch = state["epoch"], state["batch"]
        self._state = "ready"
        self._passes += 1

    def close(self) -> None:
        """End the workers; the next pass starts new ones."""
        self._drop(kindly=True)

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        this_pass = self._passes
        try:
            while (batch := self._next()) is not _end:
                self._at.batch += 1
                yield batch
                if this_pass != self._passes:
                    raise RuntimeError(
                        "SafeLoader: this pass ended when another began, or when the loader's place was set."
                    )
        except BaseException:
            if this_pass == self._passes:
                self._state = "left"
                self.close()
            raise
        self._at.epoch, self._at.batch = self._at.epoch + 1, 0
        self._state = "ready"

    def _begin(self) -> None:
        """Draw the batches of this pass, and compare their number with the other ranks."""
        if self._state != "ready":
            self._at.epoch, self._at.batch = self._at.epoch + 1, 0
            self._state = "ready"
        self._passes += 1
        self._batches = None
        self._order.take(self._plan.sampler, self._key())
        self._agree()
        if self._at.batch > len(self._order):
            raise ValueError(
                f"SafeLoader: to go on at batch {self._at.batch} of epoch {self._at.epoch} was asked for, which has "
                f"{len(self._order)}: the data, the batch size or the number of ranks is another than it was."
            )
        self._state = "running"

    def _agree(self) -> None:
        """Compare with the other ranks, if there are any; halve the workers as often as they have."""
        if not (self._plan.even and dist.is_initialized() and dist.get_world_size() > 1):
            return
        halvings = agree(len(self._order), self._at.epoch, self._at.batch, self._plan.seed, self._halvings)
        if halvings > self._halvings:
            self._drop(kindly=True)
            self._halvings = halvings

    def _next(self) -> Any:
        """The next batch, with fewer workers after a death if a retry is left; `_end` after the last one."""
        while True:
            try:
                if self._batches is None:
                    self._batches = self._started()
                with kept_randomness():
                    return next(self._batches, _end)
            except (WorkerDied, WorkerTimedOut) as error:
                self._drop(kindly=False)
                if (left := self._retries.take(self._at.epoch)) < 0:
                    raise
                self._halvings += 1
                logger.warning(
                    "rank %d: %s before it delivered batch %d of epoch %d; the loader goes on at batch %d with num_workers=%d. "
                    "Retries left in this epoch, on all ranks: %d.",
                    *(error.rank, error.what, error.batch, error.epoch, self._at.batch, self.num_workers, left),
                )

    def _started(self) -> Iterator[Any]:
        """torch's iterator, from the next batch on."""
        if self._loader is None:
            self._loader = self._new_loader()
        self._order.first = self._at.batch
        with kept_randomness():
            seed_generators(self._key())
            # torch seeds its workers with this; `Fetch` seeds again for each batch.
            self._loader.generator.manual_seed(torch.default_generator.initial_seed())
            return iter(self._loader)

    def _key(self) -> tuple[int, ...]:
        return (self._plan.seed, self._plan.here.rank, self._at.epoch)

    def _new_loader(self) -> WatchedLoader:
        plan = self._plan
        options: dict[str, Any] = {}
        if self.num_workers:
            options = {
                "num_workers": self.num_workers,
                "timeout": plan.timeout_s or 0,
                "multiprocessing_context": plan.multiprocessing_context,
                "persistent_workers": True,
            }
        return WatchedLoader(
            Fetch(plan.dataset, plan.collate),
            batch_sampler=self._order,
            collate_fn=as_it_is,
            at=self._at,
            generator=torch.Generator(),
            pin_memory=plan.pin_memory,
            **options,
        )

    def _drop(self, kindly: bool) -> None:
        """Let go of torch's loader and its workers."""
        if self._loader is not None:
            self._loader.end(kindly)
        self._loader = self._batches = None
