"""The batches of an epoch: which samples each holds, and the random numbers it is made with."""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ddpkit.rank.saving.randomness import random_states, set_random_states

Key = tuple[int, ...]


class Batch(list[Any]):
    """The indices of one batch's samples, and the key of its random numbers."""

    key: Key = ()


class Order:
    """The batches of one epoch on one rank, as a batch sampler for torch; its key is (seed, rank, epoch).

    It holds the indices of the whole epoch, as DistributedSampler does, so a pass can begin at any batch.
    """

    def __init__(self, batch_size: int, drop_last: bool) -> None:
        self._batch_size, self._drop_last = batch_size, drop_last
        self._indices: Sequence[Any] = ()
        self._key: Key = ()
        self.first = 0

    def batches_in(self, samples: int) -> int:
        """How many batches `samples` samples make."""
        return samples // self._batch_size if self._drop_last else -(-samples // self._batch_size)

    def take(self, sampler: Any, key: Key) -> None:
        """Draw the indices of an epoch from `sampler`, with random numbers that depend on `key` alone."""
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(key[-1])
        with kept_randomness():
            seed_generators(key)
            self._indices = list(sampler)
        self._key = key

    def __len__(self) -> int:
        return self.batches_in(len(self._indices))

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.first, len(self)):
            batch = Batch(self._indices[number * self._batch_size : (number + 1) * self._batch_size])
            batch.key = (*self._key, number)
            yield batch


class Fetch:
    """The user's dataset, which makes whole batches here. The random generators are seeded for each batch, so a batch
    does not depend on its worker, nor on the batches before it."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitems__(self, batch: Batch) -> Any:
        seed_generators(batch.key)
        fetch = getattr(self._dataset, "__getitems__", None)
        samples = fetch(list(batch)) if fetch else [self._dataset[i] for i in batch]
        return self._collate(samples)


def as_it_is(batch: Any) -> Any:
    """The collate function for torch's loader: `Fetch` has collated already."""
    return batch


def seed_generators(key: Key) -> None:
    """Seed Python's, NumPy's and torch's CPU generators from `key`. `torch.manual_seed` would also seed the GPU's, which
    belong to the model."""
    numbers = struct.unpack("<QIq", hashlib.blake2b(repr(key).encode(), digest_size=20).digest())
    random.seed(numbers[0])
    np.random.seed(numbers[1])
    torch.default_generator.manual_seed(numbers[2])


@contextlib.contextmanager
def kept_randomness() -> Iterator[None]:
    """Put this process's random generators back afterwards: dropout must not depend on who loads the data."""
    cpu = torch.device("cpu")
    states = random_states(cpu)
    try:
        yield
    finally:
        set_random_states(states, cpu)
