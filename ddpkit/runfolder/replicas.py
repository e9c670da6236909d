"""Compares the DDP models of the ranks at their end, which `recorder/replicas.py` wrote down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import wire
from .ranks import Rank

_FLOAT_BYTES = 4


class Replicas(str):
    """`equal`, or `0.41 apart, first in head.weight`: the largest difference between two ranks.

    In units of the largest value if that is above 1. `apart`: `0.41 apart`, or "" if equal. `buffers`: the same for the
    buffers, "" if there are none; they may differ, because DDP only sends rank 0's before each forward.
    """

    apart: str
    buffers: str

    def __new__(cls, said: str, apart: str, buffers: str) -> Replicas:
        made = super().__new__(cls, said)
        made.apart, made.buffers = apart, buffers
        return made

    def __repr__(self) -> str:
        return f"{self}; buffers {self.buffers}" if self.buffers else str(self)


@dataclass(frozen=True)
class _Model:
    """One DDP model on one rank: the values of each tensor as float32 bytes, by name."""

    values: dict[str, bytes]
    buffers: frozenset[str]

    @property
    def shape(self) -> dict[str, int]:
        return {name: len(content) for name, content in self.values.items()}


def compare(ranks: Sequence[Rank]) -> Replicas | None:
    """How far the replicas are apart; None for one rank, no DDP model, or models that do not match."""
    headers = [wire.read_record(rank.folder / wire.REPLICAS) for rank in ranks]
    if not all(headers):
        return None
    # The key: the ranks that share a model, and its number among their models.
    found: dict[tuple[tuple[int, ...], int], list[_Model]] = {}
    for rank, header in zip(ranks, headers, strict=True):
        for key, model in _read(rank, header or {}):
            found.setdefault(key, []).append(model)
    shared = [models for models in found.values() if len(models) > 1]
    if not shared or any(model.shape != models[0].shape for models in shared for model in models):
        return None
    apart = _apart(shared, buffers=False)
    of_buffers = ", first in ".join(_apart(shared, buffers=True)) or "equal"
    has_buffers = any(models[0].buffers for models in shared)
    return Replicas(", first in ".join(apart) or "equal", apart[0] if apart else "", of_buffers if has_buffers else "")


def _read(rank: Rank, header: dict[str, Any]) -> Iterator[tuple[tuple[tuple[int, ...], int], _Model]]:
    try:
        content = (rank.folder / wire.REPLICA_VALUES).read_bytes()
    except OSError:
        return
    begin, counted = 0, dict[tuple[int, ...], int]()
    for described in header["models"]:
        values = {}
        for name, length in zip(described["names"], described["lengths"], strict=True):
            values[name] = content[begin : begin + length * _FLOAT_BYTES]
            begin += length * _FLOAT_BYTES
        group = tuple(described["ranks"])
        counted[group] = counted.get(group, 0) + 1
        yield (group, counted[group]), _Model(values, frozenset(described["buffers"]))


def _apart(shared: Sequence[Sequence[_Model]], buffers: bool) -> tuple[str, ...]:
    """`0.41 apart`, the largest difference, and the first tensor that differs; () if all are equal."""
    first, most = "", 0.0
    for models in shared:
        for name in models[0].values:
            contents = {model.values[name] for model in models}
            if (name in models[0].buffers) != buffers or len(contents) == 1:
                continue
            # numpy takes a while to import, and usually the bytes are equal.
            from .steps import apart_bytes, equal

            apart = apart_bytes(list(contents))
            if not equal(apart):
                first, most = first or name, max(most, apart)
    words = f"{most:.2g} apart" if most < float("inf") else "apart by values that are not finite"
    return (words, first) if first else ()
