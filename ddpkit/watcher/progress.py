"""Tells when each rank last made progress: output, a collective, a send or receive, a report.

Being busy does not count: a wait for a peer and an endless loop can both keep a core or a GPU busy.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil

from ddpkit.machine import devices
from ddpkit.runfolder import wire
from ddpkit.runfolder.ranks import Rank
from ddpkit.verdict.places import BUSY_FROM

from .look import ask, look, size

# A rank that prints or reports is never asked for its collectives.
ASK_AFTER_S = 0.4
LATELY_S = 1.5
# A rank that makes progress is not asked for its disk use, which would cost a quarter more.
QUIET_S = 1.0
# More than a logger writes in the meantime.
MUCH_DATA_BYTES = 256 * 1024


class Used(NamedTuple):
    """What a process has used by `at` (monotonic clock); `cpu_s` includes its waits for a core."""

    at: float
    cpu_s: float
    disk_bytes: int | None = None
    waits_for_disk: bool = False


class Memory(NamedTuple):
    """What a rank holds: MiB of this host, and of the device with that name."""

    rss_mib: float | None = None
    device: str = ""
    device_mib: float | None = None


@dataclass
class Heard:
    """When one rank last made progress (monotonic clock), and what its process `used` lately."""

    at: float
    signs: object = None
    collectives: object = None
    asked: float = 0.0
    has_spoken: bool = False
    used: deque[Used] = field(default_factory=deque)


class Progress:
    """Follows the ranks of one job on this host; the watcher calls it a few times a second."""

    def __init__(self) -> None:
        self._heard: dict[tuple[int, int], Heard] = {}
        self._ended: tuple[tuple[bool, int | None], ...] = ()
        self._ended_at = -math.inf
        self._children: dict[tuple[int, int], tuple[list[int], float, float]] = {}

    def spoke(self, attempt: int, rank: int) -> None:
        """Note that the rank has written a line."""
        heard = self._of(attempt, rank)
        heard.at, heard.has_spoken = time.monotonic(), True

    def update(self, ranks: Sequence[Rank]) -> None:
        """Look for reports and new collectives of the running ranks, and at what they used."""
        self._note_ends(ranks)
        now = time.monotonic()
        for rank in ranks:
            if rank.exitcode is not None or not rank.pid:
                continue
            heard = self._of(rank.attempt, rank.rank)
            signs, collectives = _signs(rank), _joined(rank)
            # A rank's first count is only the start of counting.
            if signs != heard.signs or (heard.collectives is not None and collectives != heard.collectives):
                heard.at = now
            heard.signs, heard.collectives = signs, collectives
            of_disk = _disk_use(rank.pid) if now - heard.at > QUIET_S else ()
            heard.used.append(Used(now, wanted_s(rank.pid), *of_disk))
            # A look at ranks that do not answer takes longer than that, so two points are kept in any case.
            while len(heard.used) > 2 and now - heard.used[0].at > LATELY_S:
                heard.used.popleft()
            if now - max(heard.at, heard.asked) > ASK_AFTER_S:
                heard.asked = now
                ask(rank, wire.ASK_COUNT)

    def _note_ends(self, ranks: Sequence[Rank]) -> None:
        ended = tuple((rank.failure is not None, rank.exitcode) for rank in ranks)
        if ended != self._ended:
            self._ended, self._ended_at = ended, time.monotonic()

    def look(self, ranks: Sequence[Rank], why: str) -> None:
        """Look at every living rank and record what is found."""
        silent_s = {rank.rank: self.silent_s(rank) for rank in ranks}
        busy = {rank.rank: self.busy(rank) for rank in ranks}
        look(ranks, why, silent_s, busy)

    def lost(self) -> list[str]:
        """The hosts that give no sign of life any more."""
        return []

    def memory(self, ranks: Sequence[Rank]) -> dict[int, Memory]:
        """The memory of each rank."""
        living = [rank.pid if rank.exitcode is None else None for rank in ranks]
        resident, used = devices.rss_mib(living), devices.device_mib([pid for pid in living if pid])
        found = {}
        for rank, pid, rss in zip(ranks, living, resident, strict=True):
            gpu, mib = used.get(pid or 0, (None, None))
            found[rank.rank] = Memory(rss, f"GPU {gpu.index}" if gpu else "", mib)
        return found

    def silent_s(self, rank: Rank) -> float:
        """Seconds since this rank's last progress."""
        return time.monotonic() - self._of(rank.attempt, rank.rank).at

    def busy(self, rank: Rank) -> float:
        """The share of a core that this rank used lately, counting its waits for a core."""
        used = self._of(rank.attempt, rank.rank).used
        if len(used) < 2:
            return 0.0
        return max(0.0, used[-1].cpu_s - used[0].cpu_s) / (used[-1].at - used[0].at)

    def at_the_disk(self, rank: Rank) -> bool:
        """Whether this rank lately waited for the disk, or moved much data."""
        used = self._of(rank.attempt, rank.rank).used
        moved = [point.disk_bytes for point in used if point.disk_bytes is not None] or [0]
        return moved[-1] - moved[0] >= MUCH_DATA_BYTES or any(point.waits_for_disk for point in used)

    def doing(self, rank: Rank) -> str:
        """What a running rank that has printed nothing does, as far as is known without a look at it."""
        heard = self._of(rank.attempt, rank.rank)
        if heard.has_spoken or len(heard.used) < 2:
            return "running"
        if not rank.came_up:
            return "waits to join"
        told = wire.read_record(rank.folder / wire.PROGRESS) or {}
        if told.get("under_way") and time.time_ns() - told["at_ns"] < LATELY_S * 1e9:
            return f"in {told['under_way']}"
        if self.busy(rank) >= BUSY_FROM:
            return "computes"
        return "waits for the disk" if self.at_the_disk(rank) else "sits idle"

    def children_busy(self, rank: Rank) -> float:
        """The share of a core that this rank's child processes used since the last call.

        It is infinite at the first call, and if other processes have replaced them, as a compiler's do.
        """
        try:
            children = [child.pid for child in psutil.Process(rank.pid).children(recursive=True)]
        except psutil.Error:
            return 0.0
        now, used_s = time.monotonic(), sum(map(wanted_s, children))
        known, before, before_s = self._children.get((rank.attempt, rank.rank), ([], now, used_s))
        self._children[rank.attempt, rank.rank] = children, now, used_s
        if not children:
            return 0.0
        return max(0.0, used_s - before_s) / (now - before) if children == known and now > before else math.inf

    def job_silent_s(self, ranks: Sequence[Rank]) -> float:
        """Seconds since a running rank made progress, or a rank failed or ended; 0 if none runs."""
        silent_s = [self.silent_s(r) for r in ranks if r.exitcode is None and r.pid]
        return min(*silent_s, time.monotonic() - self._ended_at) if silent_s else 0.0

    def _of(self, attempt: int, rank: int) -> Heard:
        return self._heard.setdefault((attempt, rank), Heard(time.monotonic()))


def _joined(rank: Rank) -> object:
    """The rank's last count of collectives begun, collectives ended, and messages; None without a count."""
    told = wire.read_record(rank.folder / wire.PROGRESS)
    return [told.get(counted) for counted in ("enqueued", "completed", "exchanges")] if told else None


def _signs(rank: Rank) -> object:
    """The other signs: its reports, its process group, and the end of its script."""
    joining, joined = ((rank.folder / name).exists() for name in (wire.JOINING, wire.ASK))
    return size(rank.folder / wire.REPORTS), joining, joined, rank.finished_ns


def wanted_s(pid: int) -> float:
    """Seconds of CPU that a process has used, or would have on an idle machine."""
    return _cpu_s(pid) + _ready_s(pid)


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(psutil.Error):
        used = psutil.Process(pid).cpu_times()
        return used.user + used.system
    return 0.0


def _ready_s(pid: int) -> float:
    """Seconds that a process's main thread was ready to run without a core; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as told:
            return int(told.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _disk_use(pid: int) -> tuple[int, bool]:
    """Bytes that a process has read and written, and whether it waits for the disk."""
    moved, waits = 0, False
    with contextlib.suppress(psutil.Error, AttributeError):
        process = psutil.Process(pid)
        waits = process.status() == psutil.STATUS_DISK_SLEEP
        counted = process.io_counters()
        moved = counted.read_bytes + counted.write_bytes
    return moved, waits
