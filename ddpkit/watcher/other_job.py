"""Looks from outside at a running torchrun job that ddpkit need not have started: `ddpkit look`.

The ranks are only read, never signalled, halted or asked. What is read becomes the records of a temporary run folder, so
that question 2 of docs/verdict.md is asked as for a job of ddpkit's own; but without a record of collectives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from ddpkit.display.rows import Row, rows
from ddpkit.display.text import short_file, text_lines
from ddpkit.machine import devices
from ddpkit.processes.running_jobs import RunningJob, job_of
from ddpkit.runfolder import wire
from ddpkit.runfolder.account import Ending
from ddpkit.runfolder.ranks import Rank
from ddpkit.verdict.judge import who_holds_up_the_job
from ddpkit.verdict.phrases import doing, ranks_said
from ddpkit.verdict.waits import Scene, scene
from ddpkit.verdict.words import sentence

from .look import SPY_WITHIN_S, Thread, look, spied_threads, spy, state_of
from .progress import wanted_s

# Two glances this far apart: a rank that waits has not moved in between.
INTERVAL_S = 1.5
# py-spy may catch a running process in the middle of a call.
_TRIES = 3


@dataclass(frozen=True)
class Process:
    """What the system says of a rank's process; `busy` is the share of a core that it used while ddpkit looked."""

    pid: int
    state: str
    busy: float
    rss_mib: float | None

    def __str__(self) -> str:
        return f"pid {self.pid} · {self.state} · CPU {self.busy:.0%} · {self.rss_mib or 0:,.0f} MiB"


@dataclass(frozen=True)
class Seen:
    """What a look at a job saw. `waited_for`: the ranks for which the others wait, () if the stacks do not tell.

    `unread`: why stacks could not be read, and what to do; "" if all were read.
    """

    job: RunningJob
    sentence: str
    waited_for: tuple[int, ...]
    table: tuple[Row, ...]
    processes: Mapping[int, Process]
    unread: str = ""

    def __str__(self) -> str:
        """The verdict, a line for each rank, and the stacks."""
        job = self.job
        size = f"{job.world_size} ranks" + (f", {len(job.pids)} of them here" if job.elsewhere else "")
        lines = [f"{job.command or 'a torchrun job'} (pid {job.agent}) · {size}"]
        lines += [f"  {said}" for said in (self.sentence, self.unread) if said]
        known = [row for row in self.table if row.stack or row.rank in job.ended]
        lines += [f"  {line}" for line in text_lines(known)]
        lines += [f"  rank {rank}  {process}" for rank, process in self.processes.items()]
        for row in self.table:
            if row.stack:
                lines.append(f"  stack of rank {row.rank}, innermost first:")
                lines += [f"    {short_file(f)}:{f.line} {f.function}  {f.source}".rstrip() for f in row.stack]
        return "\n".join(lines)

    def json(self) -> str:
        """The same as JSON."""
        by_rank = []
        for row in self.table:
            process = self.processes.get(row.rank)
            told = {"rank": row.rank, "does": row.words, "where": row.where}
            stack = [asdict(frame) for frame in row.stack]
            by_rank.append({**told, "process": asdict(process) if process else None, "stack": stack})
        told = {"agent": self.job.agent, "command": self.job.command, "world_size": self.job.world_size}
        said = {"sentence": self.sentence, "waited_for": self.waited_for, "unread": self.unread}
        return json.dumps({**told, **said, "ranks": by_rank}, indent=1)


def look_at(pid: int | None = None) -> Seen:
    """What a job does, by its agent's or a rank's pid; without one, this user's only job on this host.

    Raises:
        NoSuchJob: there is no such job, or a pid is needed.
    """
    job = job_of(pid)
    pids = list(job.pids.values())
    before, used, began = _glance(pids), _used(pids), time.monotonic()
    time.sleep(INTERVAL_S)
    after_s, lasted_s, threads = _used(pids), time.monotonic() - began, _glance(pids)
    busy = {rank: max(0.0, after_s[p][0] - used[p][0]) / lasted_s for rank, p in job.pids.items()}
    moved = {r for r, p in job.pids.items() if _main(before, p) != _main(threads, p) or after_s[p][1] != used[p][1]}
    with tempfile.TemporaryDirectory(prefix="ddpkit-look-") as folder:
        ranks = _records(job, Path(folder), threads)
        look([rank for rank in ranks if rank.pid], "asked", {}, busy, threads)
        said, waited_for = _verdict(job, ranks, moved)
        table = rows(ranks, waited_for)
    processes = {}
    for (rank, own), rss_mib in zip(job.pids.items(), devices.rss_mib(pids), strict=True):
        processes[rank] = Process(own, state_of(own), round(busy[rank], 2), rss_mib)
    return Seen(job, said, waited_for, table, processes, _why_unread(job, threads))


def _glance(pids: Sequence[int]) -> dict[int, list[Thread]]:
    found: dict[int, list[Thread]] = {}
    for _ in range(_TRIES):
        found |= spied_threads([pid for pid in pids if pid not in found])
    return found


def _main(threads: Mapping[int, Sequence[Thread]], pid: int) -> Any:
    """The frames of a process's main thread with their variables; a loop changes some of them."""
    return threads[pid][0]["frames"] if pid in threads else None


def _used(pids: Sequence[int]) -> dict[int, tuple[float, int]]:
    """The CPU seconds of each process, and how often its main thread has gone to sleep."""
    found = {}
    for pid in pids:
        status = wire.read_text(Path(f"/proc/{pid}/status"))
        slept = status.partition("\nvoluntary_ctxt_switches:")[2].split()[:1]
        found[pid] = wanted_s(pid), int(slept[0]) if slept else 0
    return found


def _records(job: RunningJob, folder: Path, threads: Mapping[int, Sequence[Thread]]) -> list[Rank]:
    """The ranks of this host with empty folders, as in a run folder; those in `init_process_group` join."""
    ranks = []
    for number in sorted({*job.pids, *job.ended}):
        own, pid = wire.rank_folder(folder, 0, number), job.pids.get(number, 0)
        own.mkdir(parents=True)
        frames = _main(threads, pid) or ()
        if any(frame["name"] == "init_process_group" for frame in frames):
            joining = {"at_ns": time.time_ns(), "master": job.master, "rank": number, "world_size": job.world_size}
            wire.write_record(own / wire.JOINING, joining)
        # torchrun ends the job when a rank fails, so a rank that is gone has left with exit code 0.
        left = 0 if number in job.ended else None
        ranks.append(
            Rank(number, 0, 0, own, None, pid=pid or None, exitcode=left, master=job.master, world_size=job.world_size)
        )
    return ranks


def _verdict(job: RunningJob, ranks: Sequence[Rank], moved: set[int]) -> tuple[str, tuple[int, ...]]:
    """The sentence, and the ranks for which the others wait, as far as the stacks show it."""
    now = scene(ranks)
    unknown = sorted(now.of_kind("unknown"))
    if len(unknown) == len(job.pids):
        return "", ()
    going_on = sorted(moved & now.waiting.keys())
    if going_on:
        return f"{ranks_said(going_on).capitalize()} went on within {INTERVAL_S:g} s: no wait lasts.", ()
    if unknown and now.waiting:
        unread = f"{ranks_said(unknown)} could not be read"
        return f"{_each(now)} Which rank the others wait for cannot be told: {unread}.", ()
    if job.elsewhere and len(now.waiting) == now.size:
        here = f"The job has {job.world_size} ranks; look at the others on their hosts, too."
        return f"Every rank on this host waits. {_each(now)} {here}", ()
    found = who_holds_up_the_job(ranks)
    if found.rule in ("end of the waits", "absent") and len(found.ranks) > 1:
        return f"{_each(now)} Which of {ranks_said(found.ranks)} the others wait for cannot be told.", ()
    said = sentence(found, ranks, Ending(running=True))
    return said, found.ranks if now.waiting or found.rule in ("lock", "signal") else ()


def _each(now: Scene) -> str:
    """`Rank 0 waits at line 9; rank 1 sits at line 12.`"""
    said = "; ".join(f"rank {number} {doing(place)}" for number, place in now.at.items())
    return f"R{said[1:]}."


def _why_unread(job: RunningJob, threads: Mapping[int, Sequence[Thread]]) -> str:
    """Which stacks could not be read, why, and what to do; "" if all were read."""
    unread = {rank: pid for rank, pid in job.pids.items() if pid not in threads}
    if not unread:
        return ""
    which, pid = ranks_said(sorted(unread)), min(unread.values())
    spying = [*spy(), "dump", "--nonblocking", "--pid", str(pid)]
    try:
        told = subprocess.run(spying, capture_output=True, text=True, timeout=SPY_WITHIN_S).stderr
    except (OSError, subprocess.SubprocessError) as error:
        told = str(error)
    if "permission" not in told.lower() and "not permitted" not in told:
        said = (told.strip().splitlines() or ["no answer"])[0]
        return f"py-spy could not read the stacks of {which}: {said}. Try again."
    scope = wire.read_text(Path("/proc/sys/kernel/yama/ptrace_scope")).strip()
    why = "this process lacks the capability SYS_PTRACE, as in most containers"
    if (owner := psutil.Process(pid).uids().real) != os.getuid():
        why = f"they belong to another user (uid {owner})"
    elif scope not in ("", "0"):
        why = f"kernel.yama.ptrace_scope is {scope}"
    command = Path(sys.executable).with_name("ddpkit")
    return (
        f"py-spy may not read the stacks of {which}: {why}. Run `sudo {command} look {job.agent}`; start a "
        "container with --cap-add SYS_PTRACE."
    )
