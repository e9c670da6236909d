"""Looks at the living ranks of a job in which nothing moves: stacks, collectives, process state.

py-spy comes first: it reads every thread from outside, also of a stopped process and of a loader's workers, and no rank
notices. If the system forbids that, faulthandler writes the main thread's stack in a signal handler, which needs neither
the GIL nor torch. But torch's poll for the store gives up at a signal with "Interrupted system call".
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ddpkit.machine import devices
from ddpkit.processes.agent import handles, signal_rank
from ddpkit.runfolder import wire
from ddpkit.runfolder.frames import with_sources
from ddpkit.runfolder.ranks import Rank

from . import file_locks

WITHIN_S = 1.2
# A rank that releases the GIL answers at once, or in seconds on a full machine.
ANSWERS_WITHIN_S = 6.0
SPY_WITHIN_S = 2.5
# py-spy reads the symbols of all of torch: half a second, or several on a busy machine.
SPY_NATIVE_WITHIN_S = 10.0
MOST_WORKERS = 8
# In a DataLoader, or in a wait for processes that the rank has started.
_WITH_CHILDREN = re.compile(r"torch.utils.data.dataloader\.py|multiprocessing.(spawn|process|popen_\w+|pool)\.py")


Thread = Mapping[str, Any]


def look(
    ranks: Sequence[Rank],
    why: str,
    silent_s: Mapping[int, float],
    busy: Mapping[int, float],
    spied: Mapping[int, Sequence[Thread]] | None = None,
) -> None:
    """Look at every living rank and record what is found, within about `ANSWERS_WITHIN_S`.

    `silent_s` and `busy` are the seconds since each rank's last progress and the share of a core it used lately. `spied`:
    the threads by pid, if they have been read; then no rank is halted to read the C++ functions that it is in.
    """
    may_halt = spied is None
    living = {rank.pid: rank for rank in ranks if rank.exitcode is None and rank.pid}
    states = {pid: state_of(pid) for pid in living}
    spied = spied_threads(list(living)) if spied is None else spied
    _gather(living, states, spied)
    on_gpu = devices.device_busy(list(living))
    locked_by = file_locks.locked_by(spied)
    for pid, rank in living.items():
        waited_for = _children_waited_for(rank)
        children = list(map(state_of, waited_for))
        sleeps_with_the_gil = pid in spied and _has_the_gil(spied[pid]) and states[pid] == psutil.STATUS_SLEEPING
        holder = living.get(locked_by.get(pid, 0))
        record = {
            "at_ns": time.time_ns(),
            "why": why,
            "state": states[pid],
            "busy": round(busy.get(rank.rank, 0.0), 2),
            "gpu_busy": on_gpu.get(pid),
            "silent_s": round(silent_s.get(rank.rank, 0.0), 1),
            "workers": list(_workers_of(rank, waited_for).items()),
            "inside": _inside(pid) if sleeps_with_the_gil and may_halt else [],
            "dead_workers": children.count(psutil.STATUS_ZOMBIE),
            "stopped_workers": children.count(psutil.STATUS_STOPPED),
            "locked_by": holder.rank if holder else None,
        }
        with contextlib.suppress(OSError):
            wire.write_record(rank.folder / wire.LOOK, record)


def _gather(living: Mapping[int, Rank], states: Mapping[int, str], spied: Mapping[int, Sequence[Thread]]) -> None:
    """Write down the stacks and collectives of the ranks, by pid; those that py-spy could not read are asked."""
    awake, unseen, unable = [], [], []
    for pid, rank in living.items():
        # If nothing was seen, the stack of an earlier look in this standstill is kept.
        if threads := spied.get(pid):
            _write(rank.folder / wire.STACK, "\n".join(map(_as_faulthandler_writes, threads)))
        if states[pid] == psutil.STATUS_STOPPED:
            continue
        awake.append(rank)
        if not threads and (not rank.joining or (rank.folder / wire.ASK).exists()):
            unseen.append(rank)
        if rank.failure or not threads or _has_the_gil(threads):
            unable.append(rank.rank)
    gather_stacks(unseen)
    gather_collectives(awake, unable)
    for rank in living.values():
        path = rank.folder / wire.STACK
        _write(path, with_sources(wire.read_text(path), rank.sources))


def withdraw(ranks: Sequence[Rank]) -> None:
    """Delete the looks of these ranks, which went on: they are no evidence any more."""
    for rank in ranks:
        for name in (wire.COLLECTIVES_ASKED, wire.LOOK):
            (rank.folder / name).unlink(missing_ok=True)
        _write(rank.folder / wire.STACK, "")


def ask(rank: Rank, question: bytes) -> bool:
    """Send `question` to the rank's answering thread; False before its process group is up."""
    try:
        pipe = os.open(rank.folder / wire.ASK, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.write(pipe, question) == len(question)
    except OSError:
        return False
    finally:
        os.close(pipe)


def gather_stacks(ranks: Sequence[Rank]) -> None:
    """Have these ranks write their stacks; one without the signal's handler is never signalled."""
    asked = []
    for rank in ranks:
        if rank.stack_signal:
            _write(rank.folder / wire.STACK, "")
            if handles(rank.pid or 0, rank.stack_signal) and signal_rank(rank.pid or 0, rank.stack_signal):
                asked.append(rank.folder / wire.STACK)
    until, sizes = time.monotonic() + WITHIN_S, [0]
    while asked and time.monotonic() < until:
        before, sizes = sizes, list(map(size, asked))
        # A stack is complete when it stops growing.
        if all(sizes) and sizes == before:
            return
        time.sleep(0.01)


def gather_collectives(ranks: Sequence[Rank], unable: Collection[int]) -> None:
    """Have these ranks write down their collectives; wait less for those that may be `unable` to answer."""
    asked = []
    for rank in ranks:
        before = _collectives_written(rank)
        if ask(rank, wire.ASK_ENTRIES):
            asked.append((rank, before))
    began = time.monotonic()
    for rank, before in asked:
        until = began + (WITHIN_S if rank.rank in unable else ANSWERS_WITHIN_S)
        while _collectives_written(rank) == before and time.monotonic() < until:
            if state_of(rank.pid or 0) in ("gone", psutil.STATUS_ZOMBIE):
                break
            time.sleep(0.01)


def _collectives_written(rank: Rank) -> tuple[int, int]:
    """When the rank last wrote its collectives, on request and at its end."""
    return wire.written_ns(rank.folder / wire.COLLECTIVES_ASKED), wire.written_ns(rank.folder / wire.COLLECTIVES)


def _has_the_gil(threads: Sequence[Thread]) -> bool:
    return threads[0].get("owns_gil") is True


def _inside(pid: int) -> list[str]:
    """The C++ functions that the main thread is in, innermost first; py-spy halts it for half a second."""
    try:
        command = [*spy(), "dump", "--json", "--native", "--pid", str(pid)]
        told = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SPY_NATIVE_WITHIN_S, check=True
        )
        (main,) = (thread["frames"] for thread in json.loads(told.stdout) if thread["os_thread_id"] == pid)
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
        return []
    names = []
    for frame in itertools.takewhile(lambda frame: frame["module"], main):
        name = re.split("[(<]", frame["name"])[0]
        if not name.startswith("0x"):
            names.append(name)
    return names


def spy() -> list[str]:
    """The command py-spy: of this environment, also if its folder is not in PATH."""
    return [shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))]


def spied_threads(pids: Sequence[int]) -> dict[int, list[Thread]]:
    """The threads of each process as py-spy reads them, the main one first; unreadable processes are left out."""
    spying = {}
    for pid in pids:
        command = [*spy(), "dump", "--json", "--locals", "--nonblocking", "--pid", str(pid)]
        with contextlib.suppress(OSError):
            spying[pid] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
    found, until = {}, time.monotonic() + SPY_WITHIN_S
    for pid, process in spying.items():
        try:
            answer, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
            threads = [t for t in json.loads(answer) if not str(t["thread_name"]).startswith("ddpkit")]
            threads.sort(key=lambda thread: thread["os_thread_id"] != pid)
            # The process runs while py-spy reads it, so a stack may be empty or cut off.
            outermost = threads[0]["frames"][-1:] if threads else ()
            if outermost and outermost[0]["name"] in ("<module>", "_run_module_as_main"):
                found[pid] = threads
        except (subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
            process.kill()
            process.communicate()
    return found


def _as_faulthandler_writes(thread: Thread) -> str:
    text = f"Thread {thread['thread_name'] or thread['thread_id']} (most recent call first):\n"
    for frame in thread["frames"]:
        text += f'  File "{frame["filename"]}", line {frame["line"]} in {frame["name"]}\n'
    return text


def _write(path: Path, text: str) -> None:
    """Write a stack into the same file: the rank keeps it open for appending."""
    with contextlib.suppress(OSError):
        path.write_text(text, encoding="utf-8")


def _workers_of(rank: Rank, pids: Sequence[int]) -> dict[int, str]:
    """The stacks of the processes that this rank waits for, as of DataLoader workers, by pid."""
    spied = spied_threads(pids[:MOST_WORKERS])
    return {pid: with_sources(_as_faulthandler_writes(threads[0]), rank.sources) for pid, threads in spied.items()}


def _children_waited_for(rank: Rank) -> list[int]:
    if not _WITH_CHILDREN.search(wire.read_text(rank.folder / wire.STACK)):
        return []
    try:
        return [child.pid for child in psutil.Process(rank.pid).children(recursive=True)]
    except psutil.Error:
        return []


def state_of(pid: int) -> str:
    """The system's word for what a process does: running, sleeping, stopped, ...; "gone" if there is none."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"


def size(path: Path) -> int:
    """Bytes in a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
