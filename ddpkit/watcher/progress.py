"""What each rank last did that counts as progress: output, a collective, a send or receive, a report. Being busy does not
count: a wait for a peer and an endless loop can both keep a core or a GPU at work."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from ddpkit.runfolder import wire
from ddpkit.runfolder.ranks import Rank

from .look import ask

# A rank that prints or reports is never asked for its collectives.
ASK_AFTER_S = 0.4
LATELY_S = 1.5
# Of a rank that gets on nobody asks whether it is at the disk: watching it would cost a quarter more.
QUIET_S = 1.0
# What a logger writes beside is less than that.
MUCH_DATA_BYTES = 256 * 1024


class Used(NamedTuple):
    """What a process has used by the time `at`, on the monotonic clock: CPU, with the time for which it was ready and others
    had the cores; bytes from and to the disk; and whether it waited for the disk just then, which no wait for a peer does. None
    where nobody asked."""

    at: float
    cpu_s: float
    disk_bytes: int | None = None
    waits_for_disk: bool = False


@dataclass
class Heard:
    """One rank's last sign of progress, on the monotonic clock; `used` has what its process had used when, lately."""

    at: float
    signs: object = None
    collectives: object = None
    asked: float = 0.0
    used: deque[Used] = field(default_factory=deque)


class Progress:
    """Follows the ranks of one job. Called by the watcher, a few times a second."""

    def __init__(self) -> None:
        self._heard: dict[tuple[int, int], Heard] = {}
        self._ended: tuple[tuple[bool, int | None], ...] = ()
        self._ended_at = -math.inf
        self._children: dict[tuple[int, int], tuple[list[int], float, float]] = {}

    def spoke(self, attempt: int, rank: int) -> None:
        """The rank has written a line."""
        self._of(attempt, rank).at = time.monotonic()

    def update(self, ranks: Sequence[Rank]) -> None:
        """Look for reports and new collectives of the ranks that run, and at what they have computed."""
        now = time.monotonic()
        ended = tuple((rank.failure is not None, rank.exitcode) for rank in ranks)
        if ended != self._ended:
            self._ended, self._ended_at = ended, now
        for rank in ranks:
            if rank.exitcode is not None or not rank.pid:
                continue
            heard = self._of(rank.attempt, rank.rank)
            signs, collectives = _signs(rank), _joined(rank)
            # The first count that a rank tells is where the counting starts.
            if signs != heard.signs or (heard.collectives is not None and collectives != heard.collectives):
                heard.at = now
            heard.signs, heard.collectives = signs, collectives
            of_disk = _disk_use(rank.pid) if now - heard.at > QUIET_S else ()
            heard.used.append(Used(now, _wanted_s(rank.pid), *of_disk))
            # A look at ranks that do not answer takes longer than that: two points are kept, or nothing could be said.
            while len(heard.used) > 2 and now - heard.used[0].at > LATELY_S:
                heard.used.popleft()
            if now - max(heard.at, heard.asked) > ASK_AFTER_S:
                heard.asked = now
                ask(rank, wire.ASK_COUNT)

    def silent_s(self, rank: Rank) -> float:
        """Seconds since this rank's last progress."""
        return time.monotonic() - self._of(rank.attempt, rank.rank).at

    def busy(self, rank: Rank) -> float:
        """The share of one core that this rank has used lately, or would have on a machine of its own; above 1 with more
        threads."""
        used = self._of(rank.attempt, rank.rank).used
        if len(used) < 2:
            return 0.0
        return max(0.0, used[-1].cpu_s - used[0].cpu_s) / (used[-1].at - used[0].at)

    def at_the_disk(self, rank: Rank) -> bool:
        """Whether this rank has waited for the disk lately, as in the first import of a package, or moved much from or to it."""
        used = self._of(rank.attempt, rank.rank).used
        moved = [point.disk_bytes for point in used if point.disk_bytes is not None] or [0]
        return moved[-1] - moved[0] >= MUCH_DATA_BYTES or any(point.waits_for_disk for point in used)

    def children_busy(self, rank: Rank) -> float:
        """The share of one core that this rank's child processes, its loader's workers, have used, or would have, since the
        last such question; infinite at the first, and where others have taken their place, as a compiler's programs do."""
        try:
            children = [child.pid for child in psutil.Process(rank.pid).children(recursive=True)]
        except psutil.Error:
            return 0.0
        now, used_s = time.monotonic(), sum(map(_wanted_s, children))
        known, before, before_s = self._children.get((rank.attempt, rank.rank), ([], now, used_s))
        self._children[rank.attempt, rank.rank] = children, now, used_s
        if not children:
            return 0.0
        return max(0.0, used_s - before_s) / (now - before) if children == known and now > before else math.inf

    def job_silent_s(self, ranks: Sequence[Rank]) -> float:
        """Seconds since any rank that runs made progress, or any rank failed or ended; 0 where none runs."""
        silent_s = (self.silent_s(r) for r in ranks if r.exitcode is None and r.pid)
        return (
            min((*silent_s, time.monotonic() - self._ended_at))
            if any(r.exitcode is None and r.pid for r in ranks)
            else 0.0
        )

    def _of(self, attempt: int, rank: int) -> Heard:
        return self._heard.setdefault((attempt, rank), Heard(time.monotonic()))


def _joined(rank: Rank) -> object:
    """How many collectives the rank has begun and ended, and sends and receives, as last told; None where it has told
    nothing."""
    told = wire.read_record(rank.folder / wire.PROGRESS)
    return [told.get(counted) for counted in ("enqueued", "completed", "exchanges")] if told else None


def _signs(rank: Rank) -> object:
    """What it has reported, whether it has come to its process group and that has come up, and whether its script has come
    to its end."""
    come, up = ((rank.folder / name).exists() for name in (wire.JOINING, wire.ASK))
    return _size(rank.folder / wire.REPORTS), come, up, rank.finished_ns


def _wanted_s(pid: int) -> float:
    """Seconds of CPU that a process has used, or would have if others had not had the cores."""
    return _cpu_s(pid) + _ready_s(pid)


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(psutil.Error):
        used = psutil.Process(pid).cpu_times()
        return used.user + used.system
    return 0.0


def _ready_s(pid: int) -> float:
    """Seconds for which the main thread of a process was ready to run and had no core, where the system tells."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as told:
            return int(told.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _disk_use(pid: int) -> tuple[int, bool]:
    """The bytes that a process has moved from and to the disk, where the platform counts them, and whether it waits there."""
    moved, waits = 0, False
    with contextlib.suppress(psutil.Error, AttributeError):
        process = psutil.Process(pid)
        waits = process.status() == psutil.STATUS_DISK_SLEEP
        counted = process.io_counters()
        moved = counted.read_bytes + counted.write_bytes
    return moved, waits


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
