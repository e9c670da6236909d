"""`Deadline`: a time limit for a step. The ranks find out through the store which of them holds up the others."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from types import TracebackType

from ddpkit.rank.joining.process_group import Here
from ddpkit.rank.joining.words import in_words
from ddpkit.recorder import failure

from .guard import BlamesRanks

PHASES = ("data", "forward", "backward", "optimizer")
# How long a rank waits for the others' positions, and for those at fault to end first.
ANSWER_S, AFTER_YOU_S = 5.0, 3.0

logger = logging.getLogger("ddpkit.rank")


class StepDeadline(BlamesRanks):
    """A step took longer than it may; `at_fault` are the ranks that hold it up."""


@dataclass(frozen=True)
class Position:
    """How far a rank is: its step, the phase of the step, and its line."""

    step: int
    phase: str
    line: str

    @property
    def order(self) -> tuple[int, int]:
        return self.step, PHASES.index(self.phase)


class Deadline:
    """Ends a job whose step takes longer than `seconds` (None: never), and says which rank holds it up.

    `at("forward", step)` notes where this rank is; it only assigns. When time is up, a thread exchanges the positions of
    all ranks through the store. The ranks that are least far, or do not answer, are at fault: they fail with
    `StepDeadline`, and the others end after them.
    """

    def __init__(self, seconds: float | None, here: Here) -> None:
        if seconds is not None and seconds <= 0:
            raise ValueError(f"Deadline: {seconds:g} seconds asked for; give more than 0, or None for no deadline.")
        self._seconds, self._here = seconds or 0.0, here
        self._mark = (math.inf, 0, PHASES[0])
        self._main = threading.main_thread().ident or 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="ddpkit-deadline")

    def __enter__(self) -> Deadline:
        if self._seconds:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def at(self, phase: str, step: int) -> None:
        """Note that this rank is in `phase` (one of `PHASES`) of `step`; the first phase starts the clock."""
        since = time.monotonic() if phase == PHASES[0] else self._mark[0]
        self._mark = (since, step, phase)

    def rest(self) -> None:
        """Stop the clock until the next step: a save or an evaluation has no deadline."""
        self._mark = (math.inf, *self._mark[1:])

    def _left_s(self) -> float:
        return self._mark[0] + self._seconds - time.monotonic()

    def _watch(self) -> None:
        while not self._ended.wait(min(max(0.01, self._left_s()), self._seconds)):
            if self._left_s() <= 0:
                return self._time_is_up()

    def _time_is_up(self) -> None:
        positions = self._positions()
        at_fault, told = held_up_by(positions, self._here.world_size)
        if self._ended.is_set():
            return
        told = f"step {self._mark[1]} has taken more than {self._seconds:g} s: {told}"
        error = StepDeadline(told, at_fault)
        logger.error("%s", error)
        traceback.print_exception(error.with_traceback(self._stack()))
        sys.stderr.flush()
        if self._here.rank not in at_fault:
            time.sleep(AFTER_YOU_S)
        failure.note(error)
        # The main thread may wait in a collective for ever; only the end of the process stops it.
        failure.leave_at_once(1)

    def _positions(self) -> dict[int, Position]:
        """The positions of this rank and of those that answer in time."""
        own, store = Position(self._mark[1], self._mark[2], self._line()), self._here.store
        store.set(f"deadline/{self._here.rank}", "\n".join((str(own.step), own.phase, own.line)))
        found, until = {self._here.rank: own}, time.monotonic() + ANSWER_S
        while len(found) < self._here.world_size and time.monotonic() < until:
            for rank in set(range(self._here.world_size)) - set(found):
                if store.check([f"deadline/{rank}"]):
                    step, phase, line = store.get(f"deadline/{rank}").decode().split("\n", 2)
                    found[rank] = Position(int(step), phase, line)
            time.sleep(0.05)
        return found

    def _stack(self) -> TracebackType | None:
        """The main thread's stack, as the traceback of an exception raised there."""
        found: TracebackType | None = None
        for frame, line in traceback.walk_stack(sys._current_frames()[self._main]):
            found = TracebackType(found, frame, frame.f_lasti, line)
        return found

    def _line(self) -> str:
        frames = list(traceback.extract_tb(self._stack()))
        own = [f for f in frames if failure.is_users_own(f.filename)] or frames
        return f"line {own[-1].lineno}: {own[-1].line}"


def held_up_by(positions: dict[int, Position], world_size: int) -> tuple[list[int], str]:
    """The ranks that hold up a step, and why. `positions` lacks those that gave no answer."""
    silent = sorted(set(range(world_size)) - set(positions))
    if silent:
        return silent, f"{in_words(silent)} did not answer when asked where it is."
    least = min(p.order for p in positions.values())
    at_fault = sorted(rank for rank, p in positions.items() if p.order == least)
    where = positions[at_fault[0]]
    told = f"in the {where.phase} of step {where.step}, {where.line}"
    if len(at_fault) == world_size:
        return at_fault, f"every rank is {told}"
    return at_fault, f"{in_words(at_fault)} is still {told}; the others wait."
