"""Reads what a look saw of a rank, and how it joined its process group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import wire
from .frames import Frame, Sources, read_frame


@dataclass(frozen=True)
class Look:
    """What a look saw of a living rank; `why` ddpkit looked: "stall", "timeout", "failure" or "asked".

    `state`: the system's word (running, sleeping, stopped, ...). `busy`, `gpu_busy`: the share of a core and of its GPU
    (None without one) in use lately. `silent_s`: seconds since its last progress. `workers`: (pid, stack) of its
    DataLoader's workers, or of other processes that it waits for; `dead_workers`, `stopped_workers`: how many died or are
    stopped. `inside`: the C++ functions in which it sleeps with the GIL, innermost first. `locked_by`: the rank that holds
    the file lock it waits for.
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
    """How a rank tried to join its process group: the store's address, its own numbers, and the user's line."""

    at_ns: int
    master: str
    rank: int
    world_size: int
    where: Frame | None = None


def read_look(path: Path) -> Look | None:
    """The look recorded at `path`; an older ddpkit may have recorded other fields."""
    record = wire.read_record(path)
    if record is None:
        return None
    known = {name: record[name] for name in Look.__dataclass_fields__ if name in record}
    workers = tuple((pid, stack) for pid, stack in record["workers"])
    return Look(**{**known, "workers": workers, "inside": tuple(record.get("inside", ()))})


def read_joining(path: Path, cells: Sources) -> Joining | None:
    """The attempt to join recorded at `path`; None if there is none."""
    record = wire.read_record(path)
    if record is None:
        return None
    return Joining(**{**record, "where": read_frame(record.get("where"), cells)})
