"""Writes down the signals that this rank sends to other processes, and from which line."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections import deque
from typing import Any

from ddpkit.runfolder import wire

from . import failure

MOST = 16

_sent: deque[dict[str, Any]] = deque(maxlen=MOST)


def arm() -> None:
    """Have `os.kill` record what it sends, also when a package calls it."""
    send = os.kill

    @functools.wraps(send)
    def told(pid: int, number: int) -> None:
        with contextlib.suppress(Exception):
            if number and pid != os.getpid():
                _note(pid, number)
        send(pid, number)

    os.kill = told


def _note(pid: int, number: int) -> None:
    name = signal.Signals(number).name
    _sent.append({"at_ns": time.time_ns(), "pid": pid, "signal": name, "where": failure.called_from()})
    failure.record(wire.SENT, {"sent": list(_sent)})
