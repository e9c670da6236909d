"""`safe_loader`: this rank's batches, the same ones after a resumption or a worker's death, of which `workers.py` tells."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from . import plan
from .agreement import Retries, UnevenData, agree
from .batches import Fetch, Order, as_it_is, kept_randomness, seed_generators
from .workers import Position, WatchedLoader, WorkerDied, WorkerTimedOut

if TYPE_CHECKING:
    from ddpkit.rank.joining.process_group import Here

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
    prefetch_factor: int = 2,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> SafeLoader:
    """A loader of this rank's part of `dataset`: `for batch in loader` is one epoch, and `set_epoch` is done.

    A batch depends on seed, rank, epoch and its number alone, random augmentation by Python's, NumPy's or torch's CPU
    generators included: not on the number of workers, nor on where a pass began. The rank's own generators stay as they
    are. Generators that the dataset keeps itself are its own matter.

    Every rank must begin each pass: where `even`, and with several ranks, that takes one all-gather, which sees uneven data
    before the first step. An IterableDataset is taken as it is: to divide it among ranks and workers is its own matter, its
    batches depend on the number of workers, a resumption loads what came before and drops it, and without a length it is
    not checked.

    Args:
        dataset: map-style (`__len__`, and `__getitem__` or `__getitems__`), or an IterableDataset.
        batch_size: samples per batch and rank.
        here: what `setup()` gave; without it torch.distributed is asked, and without that there is one rank.
        shuffle: another order each epoch; by default so where `even`, without a `sampler`.
        seed: of order and augmentation, the same on every rank.
        num_workers: processes per rank; by default min(8, cores // ranks of this host - 1), and at least 0. The cores are
            those this process may run on, and one is left to the rank itself.
        timeout_s: how long to wait for a batch of a worker, less than the process group waits for this rank; None: for ever.
        retries: how often per epoch, all ranks together, the loader is rebuilt with half the workers (1 becomes 0) after a
            worker's death or silence, and goes on at the batch that is missing. The other ranks learn of it when the next
            epoch begins, and have fewer too. `here.store` has the count; without it each rank counts for itself.
        even: by DistributedSampler all ranks have as many batches; it repeats a few samples, or leaves some out with
            `drop_last`. False, for evaluation: rank r has the samples r, r + world size, ..., each once; no collectives.
        sampler: your own, any iterable of indices that ends and has a length; its `set_epoch` is called where it has one.
        drop_last: leave out the last batch if it is not full.
        multiprocessing_context: "fork", "spawn" or "forkserver". By default forkserver with a GPU, as DDP's documentation
            asks for with NCCL; else, on Linux, fork: the first batch comes after tenths of a second instead of seconds, and
            dataset and script need not be importable.
        pin_memory: by default where this rank has a GPU.
        prefetch_factor: batches that each worker loads ahead.
        collate_fn: makes a batch from a list of samples; it may use random numbers too.

    Raises:
        ValueError: an argument cannot be, or goes not with another.
        UnevenData: when a pass begins, on every rank.
        WorkerDied, WorkerTimedOut: while a batch is waited for, on the rank whose worker it was.
    """
    planned = plan.made(
        dataset,
        batch_size=batch_size,
        here=here,
        shuffle=shuffle,
        seed=seed,
        num_workers=num_workers,
        timeout_s=timeout_s,
        retries=retries,
        even=even,
        sampler=sampler,
        drop_last=drop_last,
        multiprocessing_context=multiprocessing_context,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor,
        collate_fn=collate_fn,
    )
    loader = SafeLoader(planned)
    if planned.deals and planned.even and not len(loader):
        raise ValueError(
            f"safe_loader: {len(dataset)} samples on {planned.place.world_size} ranks in batches of {batch_size} "
            f"(drop_last={drop_last}) make no batch; take smaller batches, or more samples."
        )
    return loader


class SafeLoader:
    """What `safe_loader` returns. Each `for` is an epoch; one that is left early ends its epoch, and its workers.

    Its first `next` is where a pass begins, and asks the other ranks.
    """

    def __init__(self, plan: plan.Plan) -> None:
        self._plan = plan
        self._at = Position(plan.place.rank)
        self._order = Order(plan.batch_size, plan.drop_last) if plan.sampler is not None else None
        self._retries = Retries(plan.retries, plan.place.store)
        self._halvings = 0
        self._state: Literal["ready", "running", "left"] = "ready"
        self._passes = 0
        self._loader: WatchedLoader | None = None
        self._batches: Iterator[Any] | None = None

    @property
    def epoch(self) -> int:
        """The epoch under way, else the one that comes next; it may be set, and begins with its first batch."""
        return self._at.epoch + (self._state == "left")

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.load_state_dict({"epoch": epoch, "batch": 0})

    @property
    def num_workers(self) -> int:
        """Worker processes of this rank now; retries have halved them."""
        return self._plan.num_workers >> self._halvings

    def __len__(self) -> int:
        """Batches in a whole epoch on this rank.

        Raises:
            TypeError: the sampler, or the IterableDataset, has no length.
        """
        samples = len(self._plan.dataset if self._order is None else self._plan.sampler)
        return Order(self._plan.batch_size, self._plan.drop_last).batches_in(samples)

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its batches were handed out: not those that workers have loaded ahead."""
        return {"epoch": self._at.epoch, "batch": self._at.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Have the next pass begin where `state` was taken, on every rank.

        Raises:
            ValueError: `state` is not of that form.
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

    # A pass.

    def _begin(self) -> None:
        """Settle which batches this pass has, and that the other ranks have as many."""
        if self._state != "ready":
            self._at.epoch, self._at.batch = self._at.epoch + 1, 0
            self._state = "ready"
        self._passes += 1
        self._batches = None
        if self._order is not None:
            self._order.take(self._plan.sampler, self._key())
        self._agree()
        if self._order is not None and self._at.batch > len(self._order):
            raise ValueError(
                f"SafeLoader: to go on at batch {self._at.batch} of epoch {self._at.epoch} was asked for, which has "
                f"{len(self._order)}: the data, the batch size or the number of ranks is another than it was."
            )
        self._state = "running"

    def _agree(self) -> None:
        """Ask the other ranks, if there are any and their number of batches is known; halve the workers as often as they."""
        if not (self._plan.even and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return
        if (batches := self._batches_in_pass()) is None:
            return
        seed = self._plan.seed if self._plan.deals else 0
        halvings = agree(batches, self._at.epoch, self._at.batch, seed, self._halvings)
        if halvings > self._halvings:
            self._drop(kindly=True)
            self._halvings = halvings

    def _batches_in_pass(self) -> int | None:
        """How many batches the whole epoch has; None where only its end will tell."""
        if self._order is not None:
            return len(self._order)
        return len(self) if hasattr(self._plan.dataset, "__len__") else None

    def _next(self) -> Any:
        """The next batch, from fewer workers where a death took some and another try is left; `_end` after the last one."""
        while True:
            try:
                if self._batches is None:
                    self._start()
                return self._draw(self._at.batch)
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

    def _start(self) -> None:
        """Begin to load at the batch that comes next."""
        if self._loader is None:
            self._loader = self._new_loader()
        if self._order is not None:
            self._order.first = self._at.batch
        with kept_randomness():
            seed_generators(self._key())
            # What torch seeds its workers with; `Fetch` seeds again for each batch.
            self._loader.generator.manual_seed(torch.default_generator.initial_seed())
            self._batches = iter(self._loader)
        if self._order is None:
            for number in range(self._at.batch):
                self._draw(number)

    def _draw(self, number: int) -> Any:
        """Batch `number`, which is the next of torch's loader."""
        assert self._batches is not None
        if self.num_workers:
            return next(self._batches, _end)
        with kept_randomness():
            if self._order is None:
                seed_generators((*self._key(), number))
            return next(self._batches, _end)

    def _key(self) -> tuple[int, ...]:
        return (self._plan.seed, self._plan.place.rank, self._at.epoch)

    # torch's loader.

    def _new_loader(self) -> WatchedLoader:
        plan = self._plan
        options: dict[str, Any] = {}
        if self.num_workers:
            options = {
                "num_workers": self.num_workers,
                "timeout": plan.timeout_s or 0,
                "prefetch_factor": plan.prefetch_factor,
                "multiprocessing_context": plan.multiprocessing_context,
                # Those of an IterableDataset are seeded for their epoch when they start.
                "persistent_workers": self._order is not None,
            }
        own: dict[str, Any] = {"at": self._at, "generator": torch.Generator(), "pin_memory": plan.pin_memory}
        if self._order is not None:
            fetch = Fetch(plan.dataset, plan.collate)
            return WatchedLoader(fetch, batch_sampler=self._order, collate_fn=as_it_is, **own, **options)
        return WatchedLoader(
            plan.dataset, plan.batch_size, drop_last=plan.drop_last, collate_fn=plan.collate, **own, **options
        )

    def _drop(self, kindly: bool) -> None:
        """Let go of torch's loader and its workers."""
        if self._loader is not None:
            self._loader.end(kindly)
        self._loader = self._batches = None
