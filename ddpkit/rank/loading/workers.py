"""The worker processes of a loader: says which has died or sends nothing, and why. `loader.py` decides what follows.

torch raises for a dead worker from a handler of SIGCHLD, at whatever line runs just then, where nobody can go on; and
for a forkserver's children only at its timeout. Here the workers are checked only while a batch is waited for. torch has
no public way to do that: `WatchedIterator` uses private names of its loader, the same from torch 2.4 to 2.13.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from multiprocessing import connection, forkserver
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ddpkit.processes.keeper import signal_name
from ddpkit.processes.oom import OomWatch

TICK_S = 0.2
# A worker's connection breaks a moment before its end can be seen.
DYING_TAKES_S = 1.0
ENDING_TAKES_S = 5.0
MIB = 2**20

_NATIVE = "native code in the dataset, a decoder for instance,"
_WHY = {
    "SIGSEGV": f"{_NATIVE} touched memory that is not its own; faulthandler.enable() in the dataset shows where",
    "SIGABRT": f"{_NATIVE} gave up; its last words are on stderr",
    "SIGTERM": "somebody ended it",
}


@dataclass
class Position:
    """The place of this rank's loader: it has handed out `batch` batches of `epoch`."""

    rank: int
    epoch: int = 0
    batch: int = 0


class WorkerDied(RuntimeError):
    """A worker process of this rank's loader has died.

    It has `rank`, `worker` (from 0), `pid`, `exitcode` (-9 for signal 9), `signal` ("SIGKILL"; "" after an exit code),
    and `epoch` and `batch`: the first one that is missing. torch's own error is the `__cause__`.
    """

    def __init__(self, at: Position, worker: int, of: int, pid: int, exitcode: int, kernel_says: str) -> None:
        self.rank, self.epoch, self.batch = at.rank, at.epoch, at.batch
        self.worker, self.pid, self.exitcode = worker, pid, exitcode
        self.signal = signal_name(-exitcode) if exitcode < 0 else ""
        how = f"is killed by signal: {signal.strsignal(-exitcode)}" if exitcode < 0 else "exited unexpectedly"
        # The first sentence is torch's own, so that a search finds it.
        super().__init__(
            f"rank {at.rank}: DataLoader worker (pid {pid}) {how}. It was worker {worker} of {of}, and had yet to deliver "
            f"batch {at.batch} of epoch {at.epoch}. {self.signal or f'Exit code {exitcode}'}: {_why(exitcode, kernel_says)}. "
            "num_workers=0 shows the fault in the rank itself; with retries=1 the loader goes on with half the workers."
        )
        self.what = f"worker {worker} of {of} (pid {pid}) died of {self.signal or f'exit code {exitcode}'}"


class WorkerTimedOut(RuntimeError):
    """A worker process of this rank's loader has sent no batch for `timeout_s`. It has `rank`, `worker`, `pid`, `epoch` and
    `batch`, as WorkerDied."""

    def __init__(self, at: Position, worker: int, of: int, pid: int, timeout_s: float) -> None:
        self.rank, self.epoch, self.batch = at.rank, at.epoch, at.batch
        self.worker, self.pid = worker, pid
        super().__init__(
            f"rank {at.rank}: DataLoader timed out after {timeout_s:g} seconds: worker {worker} of {of} (pid {pid}) did not "
            f"send batch {at.batch} of epoch {at.epoch}. If that batch is merely slow, give safe_loader a larger timeout_s=; "
            'if the worker is stuck, on a lock held at the fork for instance, multiprocessing_context="forkserver".'
        )
        self.what = f"worker {worker} of {of} (pid {pid}) was silent for {timeout_s:g} s"


def preload_torch() -> None:
    """Let a forkserver that has not started yet import torch once for all its workers, instead of seconds for each.

    If the program has named modules of its own for that, they stay.
    """
    if getattr(forkserver._forkserver, "_preload_modules", None) == ["__main__"]:
        multiprocessing.set_forkserver_preload(["__main__", f"{__package__}.batches"])


def leave_with_the_rank(_worker: int) -> None:
    """Let this worker end when its rank does. torch's own watch begins later and misses a rank that was killed before."""
    threading.Thread(target=_leave_with_the_rank, daemon=True).start()


def _leave_with_the_rank() -> None:
    if rank := multiprocessing.parent_process():
        rank.join()
        os._exit(1)


class WatchedLoader(DataLoader[Any]):
    """torch's DataLoader, which raises WorkerDied and WorkerTimedOut for its workers."""

    def __init__(self, *args: Any, at: Position, **kwargs: Any) -> None:
        super().__init__(*args, worker_init_fn=leave_with_the_rank, **kwargs)
        self.at = at
        if kwargs.get("multiprocessing_context") == "forkserver":
            preload_torch()

    def _get_iterator(self) -> Any:
        return WatchedIterator(self) if self.num_workers else super()._get_iterator()

    def end(self, kindly: bool) -> None:
        """End the workers and wait until they are gone; see `WatchedIterator.end`."""
        if isinstance(self._iterator, WatchedIterator):
            self._iterator.end(kindly)


class WatchedIterator(_MultiProcessingDataLoaderIter):
    """A pass over a DataLoader with workers; with persistent workers, one pass after the other."""

    def __init__(self, loader: WatchedLoader) -> None:
        self._at = loader.at
        super().__init__(loader)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin a pass; torch calls this."""
        if first_iter:
            torch._C._remove_worker_pids(id(self))
            self._worker_pids_set = False
        self._memory = [OomWatch(w.pid) for w in self._workers]
        super()._reset(loader, first_iter)

    def _get_data(self) -> Any:
        """What a worker sends next; torch calls this."""
        until = time.monotonic() + (self._timeout or math.inf)
        while True:
            try:
                success, data = self._try_get_data(min(TICK_S, self._timeout or TICK_S))
            except Exception as error:
                if (number := self._dead()) is None:
                    raise
                raise self._death(number) from error
            if success:
                return data
            if time.monotonic() >= until:
                raise self._silence()

    def _dead(self) -> int | None:
        """The number of a worker that is gone; of several, one that did not end well."""
        if all(worker.exitcode is None for worker in self._workers):
            dying = connection.wait([worker.sentinel for worker in self._workers], DYING_TAKES_S)
            for worker in self._workers:
                if worker.sentinel in dying:
                    worker.join()
        gone = [n for n, worker in enumerate(self._workers) if worker.exitcode is not None]
        return min(gone, key=lambda n: self._workers[n].exitcode == 0, default=None)

    def _death(self, number: int) -> WorkerDied:
        worker = self._workers[number]
        kernel_says = self._memory[number].word()
        # The first batch that it was given and has not sent; between two passes there is none.
        given = (i for i, (whose, *sent) in self._task_info.items() if whose == number and not sent)
        at = replace(self._at, batch=self._at.batch + min(given, default=self._rcvd_idx) - self._rcvd_idx)
        return WorkerDied(at, number, len(self._workers), worker.pid, worker.exitcode, kernel_says)

    def _silence(self) -> WorkerTimedOut:
        awaited = self._task_info.get(self._rcvd_idx, (0,))[0]
        return WorkerTimedOut(self._at, awaited, len(self._workers), self._workers[awaited].pid, self._timeout)

    def end(self, kindly: bool) -> None:
        """End the workers and wait until they are gone. `kindly` is torch's way, which waits for locks; after a death it
        could wait for ever, as the dead worker may have held one."""
        if kindly and not any(worker.exitcode for worker in self._workers):
            self._shutdown_workers()
            return
        self._shutdown = True
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join(ENDING_TAKES_S)
        if self._pin_memory:
            self._pin_memory_thread_done_event.set()
        for queue in self._index_queues:
            queue.cancel_join_thread()
            queue.close()


def _why(exitcode: int, kernel_says: str) -> str:
    """The likely cause of such an end, without a full stop."""
    if exitcode >= 0:
        return "the dataset, or a library of it, left the process; a traceback may be on stderr"
    name = signal_name(-exitcode)
    if name == "SIGKILL":
        if kernel_says:
            return f"the kernel killed it for want of memory ({kernel_says}); take fewer workers, or arrays in place of lists"
        return "as a rule the kernel, for want of memory, but nothing that can be read here says so; else somebody's kill -9"
    if name == "SIGBUS":
        return f"a mapped page had nothing behind it: {_shared_memory()} ran full, or a memory-mapped data file was cut short"
    return _WHY.get(name, "see `man 7 signal`")


def _shared_memory() -> str:
    with contextlib.suppress(OSError):
        found = os.statvfs("/dev/shm")
        whole, free = (blocks * found.f_frsize / MIB for blocks in (found.f_blocks, found.f_bavail))
        return f"/dev/shm ({whole:.0f} MiB, {free:.0f} of them free now)"
    return "shared memory"
