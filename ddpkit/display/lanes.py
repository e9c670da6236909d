"""`LaneSink`: every rank's queued lines, and a clock that sends them in batches; the live view and the text share it.

Lines only queue here. A thread of its own sends what has queued: the first line after a quiet time at once, then a batch
every `TICK_S`. Queues are bounded; what does not fit is counted and told, never sent.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from .lane_feed import MOST_PENDING, MOST_REMEMBERED, LaneFeed, Row
from .shown import ShownRun
from .sink import Line, Now, Sink

TICK_S = 0.04
# After a quiet time so many batches may follow each other sooner: two ranks rarely print at the same moment.
SOON_S, SOON = 0.004, 5
# The most text in one batch. In a flood nobody reads along, and a browser lays out about 100 lines in 10 ms: then less.
BATCH_CHARS = 48_000
FLOOD_CHARS = 12_000


class LaneSink(Sink):
    """Queues the lines of a job; the class that shows them has the `_send_batch`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake, self._over = threading.Event(), threading.Event()
        self._clock: threading.Thread | None = None
        self._lanes: dict[int, LaneFeed] = {}
        self._start_ns = time.time_ns()
        self._gone = False

    def begin(self, run: ShownRun, stop: Callable[[], None]) -> None:
        self._start_ns = time.time_ns()
        self._lanes = {rank: LaneFeed() for rank in range(run.world_size)}
        self._clock = threading.Thread(target=self._run_clock, name=f"ddpkit shows {run.name}", daemon=True)
        self._clock.start()

    def count_from(self, began_ns: int) -> None:
        self._start_ns = began_ns

    def lines(self, batch: Sequence[Line]) -> None:
        with self._lock:
            for line in batch:
                self._lane(line.rank).add(line, self._start_ns)
        self._wake.set()

    def now(self, now: Now) -> None:
        with self._lock:
            for number, skipped in now.skipped.items():
                # Mostly known from the lines' numbers already.
                lane = self._lane(number)
                lane.skip(skipped - lane.skipped, round(now.elapsed_s, 2), 0)
        self._wake.set()

    def end(self, run: ShownRun) -> None:
        """The job has ended: the clock stops, and the last lines go out."""
        self._over.set()
        self._wake.set()
        if self._clock is not None and self._clock is not threading.current_thread():
            self._clock.join()
        for lane in self._lanes.values():
            lane.squeeze(MOST_REMEMBERED)
        self._send_batch(math.inf)

    def _send_batch(self, chars: float) -> None:
        """Send about `chars` of what has queued; the class that shows it does this."""

    def _run_clock(self) -> None:
        due = 0.0
        while not self._over.is_set() and not self._gone:
            self._wake.wait()
            self._wake.clear()
            flooded = any(lane.dropped or len(lane.pending) > MOST_PENDING // 2 for lane in list(self._lanes.values()))
            self._send_batch(FLOOD_CHARS if flooded else BATCH_CHARS)
            now = time.monotonic()
            due = max(due, now - SOON * TICK_S) + TICK_S
            self._over.wait(max(SOON_S, due - now))
            if any(lane.pending for lane in list(self._lanes.values())):
                self._wake.set()

    def _take(self, chars: float) -> list[tuple[int, list[Row]]]:
        """The next rows of every lane that has some; the caller holds the lock."""
        waiting = [number for number, lane in self._lanes.items() if lane.pending or lane.dropped]
        return [(number, self._lanes[number].take(chars / len(waiting))) for number in waiting]

    def _lane(self, rank: int) -> LaneFeed:
        return self._lanes.setdefault(rank, LaneFeed())
