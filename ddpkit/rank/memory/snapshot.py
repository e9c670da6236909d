"""Writes down what is in a rank's memory when it has run out; `monitor.py` says when.

On the CPU torch keeps no such record, so the living tensors are listed. What a backward has saved for itself is held by
C++ and cannot be listed: it is the difference between the memory in use and these tensors.
"""

from __future__ import annotations

import contextlib
import heapq
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ddpkit.runfolder import wire

from .contents import Contents
from .limits import MIB, cpu_tensors

MOST_TENSORS = 20


def of_cpu(path: Path, stats: dict[str, Any]) -> Path:
    """Write a JSON file: `stats`, the known parts of the memory in MiB, and the largest tensors that Python knows of."""
    with _room():
        contents = Contents()
        contents.look_around()
        parts = {part: round(size, 3) for part, size in contents.parts_mib().items()}
        largest, total_mib = _tensors()
        found = {"stats": stats, "parts_mib": parts, "tensors_mib": round(total_mib, 3), "largest": largest}
        path = path.with_name(path.name + ".json")
        wire.write_record(path, found)
    return path


def of_gpu(path: Path) -> Path:
    """Write the pickle in which CUDA's allocator describes itself."""
    path = path.with_name(path.name + ".pickle")
    torch.cuda.memory._dump_snapshot(str(path))
    return path


@contextlib.contextmanager
def _room() -> Iterator[None]:
    """Lift this process's limit for a moment: a list of all objects takes some MiB, and there are none left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _tensors() -> tuple[list[dict[str, Any]], float]:
    """The largest living tensors, each piece of memory once, and the MiB of all of them."""
    found = cpu_tensors().values()
    largest = heapq.nlargest(MOST_TENSORS, found, key=lambda each: each[0])
    rows = [
        {"mib": round(size / MIB, 3), "shape": list(each.shape), "dtype": str(each.dtype).removeprefix("torch.")}
        | {"parameter": issubclass(type(each), torch.nn.Parameter)}
        for size, each in largest
    ]
    return rows, sum(size for size, _ in found) / MIB
