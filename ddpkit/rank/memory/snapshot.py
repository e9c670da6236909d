"""Writes down what is in a rank's memory, at the moment when it has run out; `monitor.py` says when.

On the CPU torch keeps no such record, so the living tensors are asked. What a backward has saved for itself is held by C++
alone and cannot be listed: it is in the difference between what is used and what is told.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ddpkit.runfolder import wire

from . import budget
from .limits import MIB

MOST_TENSORS = 20


def of_cpu(path: Path, stats: dict[str, Any]) -> Path:
    """Write a JSON file: `stats`, the known parts of the memory in MiB, and the largest tensors that Python knows of."""
    with _room():
        living = gc.get_objects()
        parts = _parts_mib(living)
        largest, total_mib = _tensors(living)
        del living
        found = {"stats": stats, "parts_mib": parts, "tensors_mib": round(total_mib, 3), "largest": largest}
        path = path.with_name(path.name + ".json")
        wire.write_record(path, found)
    return path


def of_gpu(path: Path) -> Path:
    """Write the pickle that CUDA's allocator gives of itself."""
    import torch

    path = path.with_name(path.name + ".pickle")
    torch.cuda.memory._dump_snapshot(str(path))
    return path


def keep_history(wanted: bool) -> None:
    """Have CUDA's allocator remember where each tensor was made, from here on or no longer."""
    import torch

    torch.cuda.memory._record_memory_history(enabled="all" if wanted else None)


@contextlib.contextmanager
def _room() -> Iterator[None]:
    """Lift this process's own limit for a moment: a list of all objects takes some MiB, and there are none left."""
    if sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _parts_mib(living: Iterable[Any]) -> dict[str, float]:
    """What a memory budget knows of, with or without one in force."""
    import torch

    known = budget._budget
    if known is None:
        known = budget.Budget(None, _Unlimited())
        for each in living:
            if issubclass(type(each), torch.optim.Optimizer):
                known.before_step(each)
    return {part: round(size, 3) for part, size in known.parts_mib().items()}


class _Unlimited:
    """Stands where a budget keeps the memory that it limits."""

    held_mib = 0.0

    def limit(self, mib: float) -> None: ...
    def lift(self) -> None: ...
    def release(self, pid: int) -> None: ...
    def used_mib(self) -> float:
        return 0.0

    def peak_mib(self) -> float:
        return 0.0


def _tensors(living: Iterable[Any]) -> tuple[list[dict[str, Any]], float]:
    """The largest tensors among `living`, each piece of memory once, and the MiB of all of them."""
    import torch

    sizes: dict[int, tuple[int, Any]] = {}
    for each in living:
        if issubclass(type(each), torch.Tensor):
            # A tensor without memory of its own, such as a sharded one, tells no storage.
            with contextlib.suppress(Exception):
                storage = each.untyped_storage()
                if each.device.type == "cpu" and (address := storage.data_ptr()) and address not in sizes:
                    sizes[address] = (storage.nbytes(), each)
    largest = heapq.nlargest(MOST_TENSORS, sizes.values(), key=lambda found: found[0])
    rows = [
        {"mib": round(size / MIB, 3), "shape": list(each.shape), "dtype": str(each.dtype).removeprefix("torch.")}
        | {"parameter": issubclass(type(each), torch.nn.Parameter)}
        for size, each in largest
    ]
    return rows, sum(size for size, _ in sizes.values()) / MIB
