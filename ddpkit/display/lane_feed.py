"""What goes to one lane of the live view: its lines, queued and bounded, with a notice where some are left out."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from .sink import Line

MOST_PENDING = 2_000
MOST_REMEMBERED = 500
MOST_SAMPLES = 120

STREAMS = {"stdout": 0, "stderr": 1}
GAP = 2

# What goes over the wire for one line: [stream, seconds since the start, text, attempt, 1 if open, 1 if it may have been
# written before that]. For a gap the text is the number of lines that are not shown in its place.
Row = list[Any]


class LaneFeed:
    """One rank's lines on their way to the view, and the little that is kept for a view that comes late."""

    def __init__(self) -> None:
        self.pending: deque[Row] = deque()
        self.dropped = 0
        self.remembered: deque[Row] = deque(maxlen=MOST_REMEMBERED)
        self.counted = 0
        self.skipped = 0
        self.last_seq: dict[tuple[int, int], int] = {}
        self.samples: list[list[float | None]] = []

    def add(self, line: Line, start_ns: int) -> None:
        """Queue a line; a jump in its numbers says how many never came, and where."""
        stream = STREAMS.get(line.stream, 0)
        seconds = round((line.written_ns - start_ns) / 1e9, 2)
        if not line.open:
            last = self.last_seq.get((stream, line.attempt), 0)
            self.last_seq[stream, line.attempt] = line.seq
            self.skip(line.seq - last - 1, seconds, line.attempt)
        row: Row = [stream, seconds, line.text, line.attempt, int(line.open), int(not line.exact)]
        if self.pending and _replaces(row, self.pending[-1]):
            self.pending[-1] = row
            return
        self.pending.append(row)
        self.squeeze(MOST_PENDING)

    def skip(self, lines: int, seconds: float, attempt: int) -> None:
        """Leave a notice that `lines` lines are missing here."""
        if lines <= 0:
            return
        self.skipped += lines
        self.pending.append([GAP, seconds, lines, attempt, 0])

    def squeeze(self, most: int) -> None:
        """Drop the oldest queued rows above `most`; `take` says how many lines they were."""
        while len(self.pending) > most:
            self.dropped += _lines_in(self.pending.popleft())

    def take(self, chars: float) -> list[Row]:
        """The next rows to show, about `chars` of text; they are remembered for late views."""
        rows: list[Row] = []
        if self.dropped:
            first = self.pending[0] if self.pending else [GAP, 0, 0, 0, 0]
            rows.append([GAP, first[1], self.dropped, first[3], 0])
            self.dropped = 0
        while self.pending and chars > 0:
            row = self.pending.popleft()
            chars -= 40 + (len(row[2]) if row[0] != GAP else 0)
            rows.append(row)
        for row in rows:
            self._remember(row)
        return rows

    def picture(self, chars: int) -> list[Row]:
        """The newest remembered rows, about `chars` of text, opened by a notice of what came before them."""
        rows: deque[Row] = deque()
        for row in reversed(self.remembered):
            chars -= 40 + (len(row[2]) if row[0] != GAP else 0)
            if chars < 0:
                break
            rows.appendleft(row)
        earlier = self.counted - sum(map(_lines_in, rows))
        return ([[GAP, rows[0][1] if rows else 0, earlier, 0, 0]] if earlier > 0 else []) + list(rows)

    def sample(self, seconds: float, *mib: float | None) -> None:
        """Add a point to the memory curve; when it has too many, every other one goes."""
        self.samples.append([round(seconds, 1), *map(whole, mib)])
        if len(self.samples) > MOST_SAMPLES:
            del self.samples[1::2]

    def _remember(self, row: Row) -> None:
        if self.remembered and _replaces(row, self.remembered[-1]):
            self.remembered.pop()
        self.remembered.append(row)
        self.counted += _lines_in(row)


def _replaces(row: Row, before: Row) -> bool:
    """Whether `row` is the newer state of the open line `before`."""
    return bool(before[4]) and before[0] == row[0] and before[3] == row[3]


def _lines_in(row: Row) -> int:
    return row[2] if row[0] == GAP else 1 - row[4]


def whole(mib: float | None) -> int | None:
    return round(mib) if mib is not None and math.isfinite(mib) else None
