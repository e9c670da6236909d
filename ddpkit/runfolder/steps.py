"""Compares the ranks' optimizer steps with each other and with one process.

`recorder/steps.py` writes them down if a job asks for it. A difference is the largest of any parameter or gradient, in
its own unit; float32 sums of one batch taken in two ways differ by about 1e-7 of their size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import wire
from .ranks import Rank

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The share of the largest value below which two sums of the same float32 numbers stay; a real fault is far above.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Recorded:
    """What one rank wrote down: all values, or every n-th of a large model; its shard of a sharded one.

    `sizes` counts a parameter's values over all ranks, `lengths` those of this rank, which begin at `offsets`.
    """

    rank: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    ended_ns: tuple[int, ...]
    values: NDArray[np.float32]
    final: NDArray[np.float32] | None

    @property
    def steps(self) -> int:
        """How many optimizer steps were applied."""
        return len(self.ended_ns)

    @property
    def gradients(self) -> NDArray[np.float32]:
        """Shape (steps, values): before each step."""
        return self.values[0::2]

    @property
    def parameters(self) -> NDArray[np.float32]:
        """Shape (steps, values): after each step."""
        return self.values[1::2]

    def by_name(self, row: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """One row of values, cut into parameters."""
        cuts = np.cumsum(self.lengths)[:-1]
        return dict(zip(self.names, np.split(row, cuts), strict=True))

    @property
    def sharded(self) -> bool:
        """Whether this rank holds only a part of each parameter, as with FSDP2."""
        return self.lengths != self.sizes


def recorded(ranks: Sequence[Rank]) -> tuple[Recorded, ...]:
    """What each rank wrote down, in order, without ranks that applied no step."""
    written = []
    for rank in ranks:
        if found := _read(rank.folder, rank.rank):
            written.append(found)
    return tuple(written)


def replicas_apart(ranks: Sequence[Rank]) -> float | None:
    """How far the ranks' final parameters are apart, matched by name; None if they do not all hold the same ones."""
    rows, layouts = [], set()
    for rank in recorded(ranks):
        if rank.final is not None and not rank.sharded:
            names, parts = zip(*sorted(rank.by_name(rank.final).items()), strict=True)
            rows.append(np.concatenate(parts))
            layouts.add((names, tuple(map(len, parts))))
    return _apart(rows) if len(rows) == len(ranks) and len(layouts) == 1 else None


def apart_by_step(ranks: Sequence[Rank]) -> list[float]:
    """How far the ranks' parameters were apart after each step that all applied."""
    written = recorded(ranks)
    if len(written) < 2 or len({(r.names, r.lengths) for r in written}) > 1:
        return []
    steps = min(len(r.parameters) for r in written)
    return [_apart([r.parameters[step] for r in written]) for step in range(steps)]


def off_one_process(ranks: Sequence[Rank], reference: Sequence[Rank]) -> float | None:
    """How far the final parameters and last gradients are from those of `reference`, one rank.

    Matched by name; None if names or lengths do not match, or a job did not end.
    """
    mine, theirs = recorded(ranks), recorded(reference)
    if not mine or not theirs or theirs[0].final is None:
        return None
    expected = theirs[0].by_name(theirs[0].final)
    found = _assembled(mine)
    common = [name for name in found if name in expected and found[name].size == expected[name].size]
    if not common or len(common) < min(len(found), len(expected)):
        return None
    off = max(_scaled(found[name], expected[name]) for name in common)
    first = mine[0]
    if first.sharded or first.steps != theirs[0].steps or not len(first.gradients) or not len(theirs[0].gradients):
        return off
    got, wanted = first.by_name(first.gradients[-1]), theirs[0].by_name(theirs[0].gradients[-1])
    return max(off, *(_scaled(got[name], wanted[name]) for name in common))


def equal(difference: float | None) -> bool:
    """Whether a difference is no more than the order of a sum makes."""
    return difference is not None and difference <= TOLERANCE


def apart_bytes(contents: Sequence[bytes]) -> float:
    """The largest difference between any two of these; each has one rank's float32 bytes of a tensor."""
    return _apart([np.frombuffer(content, np.float32) for content in contents])


def _assembled(ranks: Sequence[Recorded]) -> dict[str, NDArray[np.float32]]:
    """The final parameters, from rank 0 or put together from all shards."""
    first = ranks[0]
    if not first.sharded:
        return first.by_name(first.final) if first.final is not None else {}
    whole = {name: np.zeros(size, np.float32) for name, size in zip(first.names, first.sizes, strict=True)}
    for rank in ranks:
        if rank.final is None:
            return {}
        for (name, part), offset in zip(rank.by_name(rank.final).items(), rank.offsets, strict=True):
            whole[name][offset : offset + part.size] = part
    return whole


def _apart(rows: Sequence[NDArray[np.float32]]) -> float:
    """The largest difference between any two rows, in the unit of `_scaled`."""
    together = np.stack(rows)
    return _scaled(np.min(together, axis=0), np.max(together, axis=0))


def _scaled(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """The largest difference, in units of the largest value if that is above 1.

    An infinity equals itself; nan is infinitely far from everything.
    """
    with np.errstate(invalid="ignore"):
        apart = np.where(one == other, np.float32(0), np.abs(one - other))
    difference = float(np.max(apart, initial=0.0))
    finite = np.abs(other[np.isfinite(other)])
    return difference / max(1.0, float(np.max(finite, initial=0.0))) if np.isfinite(difference) else float("inf")


def _read(folder: Path, rank: int) -> Recorded | None:
    header: dict[str, Any] | None = wire.read_record(folder / wire.STEPS)
    if header is None:
        return None
    lines = wire.read_text(folder / wire.STEP_TIMES).splitlines()
    times = [json.loads(line) for line in lines if line.endswith("}")]
    width = sum(header["lengths"])
    values = _floats(folder / wire.STEP_VALUES)
    # A rank that was ended in the middle of a step leaves a part of it.
    rows = values[: 2 * width * len(times)].reshape(-1, width) if width else values.reshape(0, 0)
    final = _floats(folder / wire.FINAL_VALUES)
    return Recorded(
        rank,
        tuple(header["names"]),
        tuple(header["sizes"]),
        tuple(header["lengths"]),
        tuple(header["offsets"]),
        tuple(t["at_ns"] for t in times),
        rows,
        final if final.size == width and width else None,
    )


def _floats(path: Path) -> NDArray[np.float32]:
    try:
        return np.fromfile(path, np.float32)
    except OSError:
        return np.empty(0, np.float32)
