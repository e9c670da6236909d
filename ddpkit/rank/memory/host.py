"""How much memory this host gives a rank: that of the machine or of its cgroup, divided by the ranks on it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from .limits import MIB

CGROUPS = "/sys/fs/cgroup"


def share_of_host() -> tuple[float, str]:
    """This rank's share in MiB, and whose limit that is."""
    found_mib, whose = min(_limits())
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks == 1:
        return found_mib, whose
    return found_mib / ranks, f"a share of {whose}, of {found_mib:.0f} MiB for {ranks} ranks"


def _limits() -> Iterator[tuple[float, str]]:
    """The limits on this host's processes: the machine's memory, and each cgroup that this process is in."""
    yield psutil.virtual_memory().total / MIB, "the machine's memory"
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                yield from _of_cgroup(Path(CGROUPS, "memory" if controllers else ""), path)


def _of_cgroup(mount: Path, path: str) -> Iterator[tuple[float, str]]:
    """The limits of the cgroup at `path` and of those around it, in version 1 or 2. A container sees only `mount` itself."""
    for folder in (Path(path), *Path(path).parents):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                # "max" is no number, and no limit.
                yield int((mount / str(folder).lstrip("/") / name).read_text()) / MIB, "the cgroup's limit"
