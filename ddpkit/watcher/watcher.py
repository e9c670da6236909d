"""Watches a running job: passes lines on, shows each rank's state, looks closer when nothing moves."""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpkit.display.rows import Standstill, rows
from ddpkit.display.sink import Line, Now, RankNow, Sink
from ddpkit.processes.agent import Job
from ddpkit.run import Run
from ddpkit.runfolder import wire
from ddpkit.runfolder.account import Ending
from ddpkit.runfolder.failures import note_files_that_came_later
from ddpkit.runfolder.program import keep_texts
from ddpkit.runfolder.ranks import Rank, read_attempts
from ddpkit.verdict.ends import own_end
from ddpkit.verdict.finding import Finding
from ddpkit.verdict.judge import who_holds_up_the_job
from ddpkit.verdict.phrases import ranks_said
from ddpkit.verdict.places import BUSY_FROM, place_on_the_way_out
from ddpkit.verdict.words import sentence

from .log_cap import LogCap
from .look import withdraw
from .progress import LATELY_S, Progress
from .tail import Tails

PAUSE_S = 0.004
IDLE_S = 0.25
# While ranks are still starting: what they print at once should be read at once.
STARTING_S = 0.01
STATE_EVERY_S = 0.5
# How many times longer a stalled job may run while the rank that holds it up computes.
BUSY_PATIENCE = 5
# If the last look is older than this, there is another one before the job is ended.
FRESH_S = 1.0
# So long after the last rank has ended, an agent that waits for one that has failed is told to end.
ALONE_S = 1.0
FULL_DISK_BYTES = 512 * 1024


@dataclass(frozen=True)
class Limits:
    """`timeout_s` ends the job; after `stall_s` without progress ddpkit looks, and may end it."""

    timeout_s: float | None
    stall_s: float | None
    stop_on_stall: bool


@dataclass
class Watcher:
    """Watches one job to its end, on its own thread."""

    run: Run
    job: Job
    sink: Sink
    limits: Limits
    progress: Progress = field(default_factory=Progress)
    _finding: Finding | None = None
    _still: Standstill | None = None
    _still_exits: tuple[int | None, ...] = ()
    _looked_at_failure_of: int = -1
    _hoped_at: float = -math.inf
    _ranks_seen_at: float = field(default_factory=time.monotonic)
    _handling: dict[int, dict[str, Any]] = field(default_factory=dict)

    def start(self) -> None:
        """Begin to watch and return at once. `job.over` is set at the end, whatever happens here."""
        threading.Thread(target=self._watch, name=f"ddpkit watches {self.run.name}", daemon=True).start()

    def _watch(self) -> None:
        try:
            every_line = getattr(self.sink, "wants_every_line", False)
            self._tails = Tails(self.run.folder, self.run.world_size, self.job.exit_fds(), every_line)
            self._cap = LogCap(self.job)
            self._follow()
        except Exception as error:
            # The caller must get control back even if watching breaks; the job's files are complete anyway.
            self.job.note(f"ddpkit stopped watching: {type(error).__name__}: {error}")
            self.job.stop("stopped")
        finally:
            self._note_full_disk()
            with contextlib.suppress(Exception):
                ranks = [rank for attempt in read_attempts(self.run.folder) for rank in attempt]
                keep_texts(self.run.folder, ranks)
                note_files_that_came_later(self.run.folder, (rank.folder for rank in ranks))
                withdraw([rank for rank in ranks if own_end(rank) == "passed"])
            self.job.finish()
            with contextlib.suppress(Exception):
                self.sink.end(self.run)
            self.job.over.set()

    def _follow(self) -> None:
        next_state = 0.0
        while True:
            was_running = self.job.running
            self._tails.wait(0 if self._tails.behind else IDLE_S if self._tails.complete else STARTING_S)
            now = time.monotonic()
            if now >= next_state or not was_running or not self._tails.complete:
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
        for attempt, rank in {(line.attempt, line.rank) for line in lines}:
            self.progress.spoke(attempt, rank)
        self.sink.lines(lines)

    def _say_how_it_is(self) -> None:
        attempts = read_attempts(self.run.folder)
        ranks = attempts[-1] if attempts else ()
        self._cap.apply([tail for tail in self._tails.tails.values() if tail.size > self._cap.bytes])
        self.progress.update(ranks)
        self._handling = _handling(ranks)
        self._mind_the_limits(ranks)
        self._mind_the_hosts(ranks)
        elapsed = time.monotonic() - self.job.started
        self._note_standstill(ranks, elapsed)
        self.sink.now(Now(self._state(), elapsed, self._states(ranks), self._tails.skipped, self._note(), self._still))

    def _state(self) -> str:
        return "stopping" if self.job.end["reason"] else "queued" if self.job.waits else "running"

    def _note(self) -> str:
        if self._handling:
            who, (first, *more) = ranks_said(list(self._handling)), self._handling.values()
            does = "handle SIGTERM by their own code, and have" if more else f"handles SIGTERM{first['by']}, and has"
            stop = "Stop again to end" if self.job.end["reason"] else "Stop twice to end"
            return f"{who.capitalize()} {does} {first['seconds']:g} s for that. {stop} it at once."
        if lost := self.job.end.get("lost"):
            return f"No sign of life from {', '.join(lost)}: the host, or what ran on it, is gone."
        if self.job.waits:
            return self.job.waits
        if self.job.end["notes"]:
            return self.job.end["notes"][-1]
        return f"No rank has made progress for {self.limits.stall_s:g} s." if self._finding else ""

    def _note_standstill(self, ranks: Sequence[Rank], elapsed: float) -> None:
        """Keep what was found for the display; its rows are made again when a rank has ended."""
        found, exits = self._finding, tuple(rank.exitcode for rank in ranks)
        if found is None:
            self._still = None
        elif self._still is None or exits != self._still_exits:
            attempts = read_attempts(self.run.folder)
            seen, revealed = attempts[-1] if attempts else (), self.run.revealed
            looked_ns = max((rank.look.at_ns for rank in seen if rank.look), default=time.time_ns())
            at_s = elapsed - (time.time_ns() - looked_ns) / 1e9
            said = sentence(found, seen, Ending(running=True)) if revealed else ""
            self._still, self._still_exits = Standstill(said, rows(seen, found.ranks, revealed), at_s), exits

    def _states(self, ranks: Sequence[Rank]) -> tuple[RankNow, ...]:
        found = {row.rank: row for row in self._still.rows} if self._still and self.run.revealed else {}
        memory = self.progress.memory(ranks)
        by_rank = {}
        for rank in ranks:
            kind, words = self._kind(rank)
            if kind == "silent" and rank.rank in found:
                words = found[rank.rank].words
            by_rank[rank.rank] = RankNow(rank.rank, kind, words, *memory[rank.rank], rank.attempt, rank.node)
        words = "in the queue" if self.job.waits else "starting"
        return tuple(by_rank.get(i, RankNow(i, "starting", words)) for i in range(self.run.world_size))

    def _kind(self, rank: Rank) -> tuple[str, str]:
        if rank.exitcode is None:
            if not rank.pid:
                return "starting", "starting"
            if grace := self._handling.get(rank.rank):
                left_s = max(0.0, (grace["until_ns"] - time.time_ns()) / 1e9)
                return "ending", f"handles SIGTERM, {left_s:.0f} s left"
            if rank.node in self.job.end.get("lost", ()):
                return "silent", "no sign of life"
            silent_s = self.progress.silent_s(rank)
            if self.limits.stall_s is not None and silent_s > self.limits.stall_s:
                return "silent", f"silent for {silent_s:.0f} s"
            return "running", self.progress.doing(rank) if self.run.revealed else "running"
        kind = own_end(rank)
        if not self.run.revealed and kind in ("peer_lost", "gave_up"):
            return "failed", rank.plain_words
        words = {"peer_lost": "lost its peer", "gave_up": "gave up waiting", "was_ended": "ended"}.get(kind)
        kinds = {"passed": "passed", "own": "failed", "was_ended": "ended"}
        return kinds.get(kind, "consequence"), words or rank.plain_words

    # The limits.

    def _mind_the_limits(self, ranks: Sequence[Rank]) -> None:
        if self.job.end["reason"] or self._handling:
            return
        limits, silent_s = self.limits, self.progress.job_silent_s(ranks)
        if limits.timeout_s is not None and time.monotonic() - self.job.started > limits.timeout_s:
            self._look(ranks, "timeout")
            self.job.stop("timeout")
        elif limits.stall_s is not None and silent_s > limits.stall_s:
            if self._finding is None:
                self._finding = self._look(ranks, "stall")
            now = time.monotonic()
            if self._may_still_come(ranks, silent_s):
                self._hoped_at = now
            # Progress after a long computation takes a moment to be seen.
            elif limits.stop_on_stall and now - self._hoped_at > LATELY_S:
                if silent_s > limits.stall_s + FRESH_S:
                    self._finding = self._look(ranks, "stall")
                self.job.stop("stall")
        else:
            stalled, self._finding = self._finding is not None, None
            if self._looked_at_failure_of < (attempt := _failed_attempt(ranks)):
                # The failed rank's keeper holds its exit back, so the ranks it waited for still live. If one does not, what
                # was seen of it in the standstill is kept.
                self._looked_at_failure_of = attempt
                self._look(ranks, "failure")
            elif stalled:
                withdraw(ranks)

    def _mind_the_hosts(self, ranks: Sequence[Rank]) -> None:
        now = time.monotonic()
        self.job.end["lost"] = self.progress.lost()
        if any(rank.exitcode is None for rank in ranks):
            self._ranks_seen_at = now
        elif now - self._ranks_seen_at > ALONE_S:
            self.job.let_go()

    def _may_still_come(self, ranks: Sequence[Rank], silent_s: float) -> bool:
        """Whether a stalled job may still go on or end by itself.

        The rank that holds it up, or its child, computes (imports torch, say) or waits for the disk; torch has not yet
        noticed a dead loader worker; or a failed rank is on its way out, and does not wait for another one there: it takes 5 s
        for each worker that does not answer.
        """
        found, stall_s = self._finding, self.limits.stall_s or 0
        if found is None or silent_s > BUSY_PATIENCE * stall_s:
            return False
        if found.kind == "loader_dead" or any(map(_is_ending, ranks)):
            return True
        held_by = [rank for rank in ranks if rank.rank in found.ranks or not found.ranks]
        living = [rank for rank in held_by if rank.exitcode is None and rank.pid]
        if any(self.progress.at_the_disk(rank) for rank in living):
            return True
        busy = (max(self.progress.busy(rank), self.progress.children_busy(rank)) for rank in living)
        return any(share >= BUSY_FROM for share in busy)

    def _look(self, ranks: Sequence[Rank], why: str) -> Finding:
        self.progress.look(ranks, why)
        attempts = read_attempts(self.run.folder)
        keep_texts(self.run.folder, attempts[-1] if attempts else ())
        return who_holds_up_the_job(attempts[-1] if attempts else ())

    def _note_full_disk(self) -> None:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self.run.folder).free < FULL_DISK_BYTES:
                self.job.note(
                    f"the disk that holds {wire.ENV_HOME} is full: output and records of this run may be cut."
                )


def _handling(ranks: Sequence[Rank]) -> dict[int, dict[str, Any]]:
    """The ranks that were told to end and whose own SIGTERM handlers have started, as their keepers recorded."""
    found = {}
    for rank in ranks:
        grace = wire.read_record(rank.folder / wire.GRACE) if rank.exitcode is None else None
        if grace:
            found[rank.rank] = grace
    return found


def _is_ending(rank: Rank) -> bool:
    """Whether a rank has failed, and does not wait for another rank on its way out."""
    if rank.failure is None or rank.exitcode is not None:
        return False
    place = place_on_the_way_out(rank)
    return place is None or place.kind not in ("waiting", "joining")


def _failed_attempt(ranks: Sequence[Rank]) -> int:
    """The attempt in which a rank has failed; -1 if none has."""
    return next((r.attempt for r in ranks if r.failure or r.exitcode), -1)
