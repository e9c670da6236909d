"""Where a log that several launches were written to begins to tell of another one."""

from __future__ import annotations

import re
from collections.abc import Collection

from .lines import Line

# Digits, also hexadecimal ones.
DIGITS = b"0123456789abcdef"
# What a launcher or a shell prints where a launch begins.
_LAUNCHED = re.compile(
    r"Setting OMP_NUM_THREADS environment variable for each process|values were not passed to .accelerate launch"
    r"|^(?:\S*@\S+[^$#]*|\(?\S*)[$#+%>] (?:\w+=\S+ )*(?:\S*/)?(?:torchrun|python3?|accelerate|deepspeed|srun|mpirun|bash|sh) "
)
_CLOCK = re.compile(r"\b\d\d:\d\d:\d\d\b")


class Launches:
    """Notices, line by line, that a launch begins after another one that `failed`; `ended`: its launcher said so.

    It begins where the first two lines of the log come again, or where a launcher says so. What was written earlier than what
    has been read belongs to another host of the same launch.
    """

    def __init__(self, head: bytes) -> None:
        lines = [line for line in head[: 1 << 13].lower().splitlines() if line.strip()]
        told = any(word in line for line in lines[:2] for word in (b"traceback", b'  file "', b"error", b"exception"))
        self._first = [] if told else [line.translate(None, DIGITS).rstrip() for line in lines[:2]]
        self._before, self._clock = b"", ""
        self.failed = self.ended = False

    def begins(self, line: Line, low: bytes, ranks: Collection[int]) -> bool:
        """Whether a launch begins with `line`, or began with the one before."""
        shape = low.translate(None, DIGITS).rstrip()
        first, self._before = [self._before, shape], shape
        again = first == self._first and first[0] != shape and (self.ended or (len(ranks) < 2 and not line.key))
        clock = _CLOCK.search(line.text)
        later = clock is None or clock[0] >= self._clock
        self._clock = max(self._clock, clock[0] if clock else "")
        if not (self.failed and later and (again or _LAUNCHED.search(line.text))):
            return False
        self.failed = self.ended = False
        return True
