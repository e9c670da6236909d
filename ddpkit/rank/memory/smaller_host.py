"""`host_memory`: the memory of a smaller host for a rank and its workers; beyond it, one of them is killed."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import psutil

from .host import CGROUPS
from .limits import MIB

PREFIX = "ddpkit-host-"
LOOK_S = 0.02


def host_memory(mib: int) -> None:
    """Let this rank and its workers take `mib` MiB more than they have now; beyond that, one is killed, a worker first.

    The kernel kills it if this process may make a memory cgroup, as root may. Otherwise a thread does what earlyoom does:
    it looks every 20 ms and kills the largest.

    Raises:
        RuntimeError: this is not Linux.
    """
    if not Path("/proc/self/cgroup").exists():
        raise RuntimeError("host_memory: this needs Linux, whose kernel can limit a process and its children together.")
    os.register_at_fork(after_in_child=_first_to_go)
    if not _enter_cgroup(mib):
        watch = threading.Thread(
            target=_watch, args=(mib, _own_bytes(psutil.Process())), daemon=True, name="host_memory"
        )
        watch.start()


def _first_to_go() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _enter_cgroup(mib: int) -> bool:
    """Move this process into a cgroup with that limit and without swap; whether that was allowed."""
    around = _where_to_make_one()
    for left in around.glob(f"{PREFIX}*"):
        if not psutil.pid_exists(int(left.name.removeprefix(PREFIX))):
            with contextlib.suppress(OSError):  # one that a worker is still in stays
                left.rmdir()
    folder = around / f"{PREFIX}{os.getpid()}"
    try:
        folder.mkdir()
        version_2 = (folder / "memory.max").exists()
        _write(folder / ("memory.swap.max" if version_2 else "memory.swappiness"), 0)
        _write(folder / ("memory.max" if version_2 else "memory.limit_in_bytes"), mib * MIB)
        _write(folder / "cgroup.procs", os.getpid())
    except OSError:
        return False
    return True


def _where_to_make_one() -> Path:
    """In version 1 the memory cgroup of this process; in version 2 the one around it, since its own may limit no children."""
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split(":", 2) for line in file]
    for _, controllers, path in rows:
        if "memory" in controllers.split(","):
            return Path(f"{CGROUPS}/memory{path}")
    return Path(CGROUPS, rows[-1][2].strip("/")).parent if rows[-1][2] != "/" else Path(CGROUPS)


def _write(file: Path, number: int) -> None:
    """Write to a file of a cgroup, which must be there already."""
    with open(file, "r+", encoding="utf-8") as opened:
        opened.write(str(number))


def _watch(mib: int, before: int) -> None:
    rank = psutil.Process()
    while True:
        workers = {process: _own_bytes(process) for process in rank.children(recursive=True)}
        # A fork makes the rank's own memory less, as it shares it then.
        if max(0, _own_bytes(rank) - before) + sum(workers.values()) > mib * MIB:
            max(workers, key=lambda process: workers[process], default=rank).kill()
        time.sleep(LOOK_S)


def _own_bytes(process: psutil.Process) -> int:
    """What a process has for itself alone; 0 once it has ended."""
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:
        return 0
