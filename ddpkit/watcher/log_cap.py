"""Keeps each log file under a cap on disk by cutting out its middle."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from ddpkit.processes.agent import Job
from ddpkit.runfolder import wire

from .tail import Tail

DEFAULT_CAP_MIB = 256
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_BLOCK = 4096


class LogCap:
    """Keeps the first quarter of the cap and the latest lines; the log text and a note say what is missing."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.cap_mib = float(os.environ.get(wire.ENV_LOG_CAP, DEFAULT_CAP_MIB))
        self.bytes = int(self.cap_mib * 2**20)

    def apply(self, too_long: Sequence[Tail]) -> None:
        """Cut these logs down to the cap."""
        for tail in too_long:
            start = _aligned(self.bytes // 4)
            end = _aligned(tail.size - self.bytes // 2)
            cut = wire.read_record(tail.path.with_suffix(".cut.json"))
            if cut and end - cut["to"] < self.bytes // 4:
                continue
            where = f"rank {tail.rank}'s {tail.stream}"
            if not _punch(tail, start, end):
                self._job.note(f"{where} is over {self.cap_mib:g} MiB, and this file system cannot cap it.")
                continue
            record = {"from": start, "to": end, "cap_mib": self.cap_mib}
            wire.write_record(tail.path.with_suffix(".cut.json"), record)
            self._job.note(
                f"{where} is capped at {self.cap_mib:g} MiB on disk: its middle is gone; "
                f"raise {wire.ENV_LOG_CAP} to keep more."
            )


def _punch(tail: Tail, start: int, end: int) -> bool:
    """Free the blocks between `start` and `end`; the other bytes keep their offsets."""
    if end <= start:
        return True
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    with open(tail.path, "r+b") as file:
        return fallocate(file.fileno(), _PUNCH_HOLE | _KEEP_SIZE, start, end - start) == 0


def _aligned(offset: int) -> int:
    return offset // _BLOCK * _BLOCK
