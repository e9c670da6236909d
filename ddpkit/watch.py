"""The clock over a running job: passes lines on, says how each rank is, gathers stacks, and minds the time limits."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import machine, wire
from .cap import LogCap
from .culprit import classify, plain_words
from .process import Job, signal_rank
from .records import Rank, read_attempts
from .run import Run
from .sink import Line, Now, RankNow, Sink
from .tail import Tails

PAUSE_S = 0.004
IDLE_S = 0.25
STATE_EVERY_S = 0.25
STACKS_WITHIN_S = 2.0
FULL_DISK_BYTES = 512 * 1024


@dataclass(frozen=True)
class Limits:
    """Seconds. `timeout` ends the job; `stall` without a line or report asks for stacks, or with `stop_on_stall` ends it."""

    timeout_s: float | None
    stall_s: float | None
    stop_on_stall: bool


@dataclass
class Heard:
    """What a rank last did that counts as progress."""

    at: float
    reports: int = 0
    silent: bool = False


@dataclass
class Watcher:
    """Watches one job to its end, on a thread of its own that outlives whoever started it."""

    run: Run
    job: Job
    sink: Sink
    limits: Limits
    _heard: dict[int, Heard] = field(default_factory=dict)
    _stalled: bool = False
    _stop_asked: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin to watch; returns at once. `job.over` is set at the end, whatever happens here."""
        threading.Thread(target=self._watch, name=f"ddpkit watches {self.run.name}", daemon=True).start()

    def _watch(self) -> None:
        try:
            every_line = getattr(self.sink, "wants_every_line", False)
            self._tails = Tails(self.run.folder, self.job.exit_fd(), every_line)
            self._cap = LogCap(self.job)
            self._follow()
        except Exception as error:
            # Whoever waits must get control back even if watching itself breaks; the job's files are complete anyway.
            self.job.note(f"ddpkit stopped watching: {type(error).__name__}: {error}")
            self.job.stop("stopped")
        finally:
            self._note_full_disk()
            self.job.finish()
            with contextlib.suppress(Exception):
                self.sink.end(self.run)
            self.job.over.set()

    def _follow(self) -> None:
        next_state = 0.0
        while True:
            was_running = self.job.running
            self._tails.wait(0 if self._tails.behind else IDLE_S if self._tails.tails else 0.03)
            now = time.monotonic()
            if now >= next_state or not was_running or not self._tails.tails:
                self._tails.find()
            self._pass_on(list(self._tails.read()))
            if now >= next_state:
                next_state = now + STATE_EVERY_S
                self._say_how_it_is()
            if not was_running and not self._tails.behind:
                self._pass_on(self._tails.close())
                return
            time.sleep(PAUSE_S)

    def _pass_on(self, lines: Sequence[Line]) -> None:
        if not lines:
            return
        now = time.monotonic()
        for rank in {line.rank for line in lines}:
            self._heard.setdefault(rank, Heard(now)).at = now
        self.sink.lines(lines)

    def _say_how_it_is(self) -> None:
        attempts = read_attempts(self.run.folder)
        ranks = attempts[-1] if attempts else ()
        self._cap.apply([tail for tail in self._tails.tails.values() if tail.size > self._cap.bytes])
        self._mind_the_limits(ranks)
        states = self._states(ranks)
        elapsed = time.monotonic() - self.job.started
        self.sink.now(Now(self._state(), elapsed, states, self._tails.skipped, self._note()))

    def _state(self) -> str:
        return "stopping" if self.job.end["reason"] else "running"

    def _note(self) -> str:
        if self.job.end["notes"]:
            return self.job.end["notes"][-1]
        return f"no rank has made progress for {self.limits.stall_s:g} s" if self._stalled else ""

    def _states(self, ranks: Sequence[Rank]) -> tuple[RankNow, ...]:
        living = [r.pid if r.exitcode is None else None for r in ranks]
        resident, devices = machine.rss_mib(living), machine.device_mib([p for p in living if p])
        by_rank = {}
        for rank, pid, rss in zip(ranks, living, resident, strict=True):
            gpu, mib = devices.get(pid or 0, (None, None))
            device = f"GPU {gpu.index}" if gpu else ""
            kind, words = self._kind(rank)
            by_rank[rank.rank] = RankNow(rank.rank, kind, words, rss, device, mib, rank.attempt)
        return tuple(by_rank.get(i, RankNow(i, "starting", "starting")) for i in range(self.run.nproc))

    def _kind(self, rank: Rank) -> tuple[str, str]:
        if rank.exitcode is None:
            heard = self._heard.get(rank.rank)
            if heard and heard.silent:
                return "silent", f"silent for {time.monotonic() - heard.at:.0f} s"
            return ("running", "running") if rank.pid else ("starting", "starting")
        kind = classify(rank)
        if not self.run.revealed and kind in ("peer_lost", "gave_up"):
            return "failed", plain_words(rank)
        words = {"peer_lost": "lost its peer", "gave_up": "gave up waiting", "told": "ended"}.get(kind)
        kinds = {"passed": "passed", "own": "failed", "told": "ended"}
        return kinds.get(kind, "consequence"), words or plain_words(rank)

    # The limits.

    def _mind_the_limits(self, ranks: Sequence[Rank]) -> None:
        if self.job.end["reason"]:
            return
        limits, now = self.limits, time.monotonic()
        if limits.timeout_s is not None and now - self.job.started > limits.timeout_s:
            self._end_with_stacks(ranks, "timeout")
        elif limits.stall_s is not None and self._silence(ranks, now) > limits.stall_s:
            if limits.stop_on_stall:
                self._end_with_stacks(ranks, "stall")
            elif not self._stalled:
                gather_stacks(ranks)
            self._stalled = True
        else:
            self._stalled = False

    def _silence(self, ranks: Sequence[Rank], now: float) -> float:
        """Seconds since any rank made progress; each rank's own silence is kept for its lane's header."""
        running = [r for r in ranks if r.exitcode is None and r.pid]
        for rank in running:
            heard = self._heard.setdefault(rank.rank, Heard(now))
            reports = _size(rank.folder / wire.REPORTS)
            if reports != heard.reports:
                heard.reports, heard.at = reports, now
            heard.silent = self.limits.stall_s is not None and now - heard.at > self.limits.stall_s
        return min((now - self._heard[r.rank].at for r in running), default=0.0)

    def _end_with_stacks(self, ranks: Sequence[Rank], reason: str) -> None:
        gather_stacks(ranks)
        self.job.stop(reason)

    def _note_full_disk(self) -> None:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self.run.folder).free < FULL_DISK_BYTES:
                self.job.note(
                    f"the disk that holds {wire.ENV_HOME} is full: output and records of this run may be cut."
                )


def gather_stacks(ranks: Sequence[Rank]) -> None:
    """Have every living rank write its Python stacks, and wait until they are there.

    faulthandler writes them from the signal's handler, so that neither the GIL nor a rank that listens is needed; a
    rank that has not confirmed its handler is never signalled.
    """
    asked = []
    for rank in ranks:
        if rank.exitcode is None and rank.pid and rank.stack_signal:
            with contextlib.suppress(OSError):
                os.truncate(rank.folder / wire.STACK, 0)
            if signal_rank(rank.pid, rank.stack_signal):
                asked.append(rank.folder / wire.STACK)
    until = time.monotonic() + STACKS_WITHIN_S
    while time.monotonic() < until and not all(_size(path) for path in asked):
        time.sleep(0.01)
    time.sleep(0.02 if asked else 0)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
