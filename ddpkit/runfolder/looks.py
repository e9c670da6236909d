"""What was seen of a living rank from outside, and whom it tried to join, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import wire
from .frames import Frame


@dataclass(frozen=True)
class Look:
    """How a rank was found when nothing moved, while it lived; `why` is what made ddpkit look: "stall", "timeout", "failure".

    `state` is the system's word (running, sleeping, stopped, ...), `busy` the share of a core it used lately, `gpu_busy`
    that of its GPU (None without one), `silent_s` the seconds since its last progress. `workers` are the stacks of its
    DataLoader workers by pid, `dead_workers` and `stopped_workers` how many have died and how many are stopped. `inside`
    are the C++ functions in which it sleeps with the GIL, innermost first. `locked_by` is the rank that holds the lock on
    a file for which it waits.
    """

    at_ns: int
    why: str
    state: str
    busy: float
    silent_s: float
    workers: tuple[tuple[int, str], ...]
    gpu_busy: float | None = None
    dead_workers: int = 0
    stopped_workers: int = 0
    inside: tuple[str, ...] = ()
    locked_by: int | None = None


@dataclass(frozen=True)
class Joining:
    """Whom a rank tried to join as its process group came up: the store's address, the numbers it gave for itself, and from
    which of the user's lines."""

    at_ns: int
    master: str
    rank: int
    world_size: int
    where: Frame | None = None


def read_look(path: Path) -> Look | None:
    """The look in the record at `path`; one of an older ddpkit may hold more, or less."""
    record = wire.read_record(path)
    if record is None:
        return None
    known = {name: record[name] for name in Look.__dataclass_fields__ if name in record}
    workers = tuple((pid, stack) for pid, stack in record["workers"])
    return Look(**{**known, "workers": workers, "inside": tuple(record.get("inside", ()))})


def read_joining(path: Path) -> Joining | None:
    """Whom a rank tried to join, by the record at `path`."""
    record = wire.read_record(path)
    if record is None:
        return None
    where = record.get("where")
    return Joining(**{**record, "where": Frame(**where) if where else None})
