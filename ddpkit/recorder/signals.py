"""Writes down which signals this rank sends to other processes, and from which line: who is killed or stopped cannot tell."""

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
    """Have `os.kill` tell of what it sends, other packages' calls of it included."""
    send = os.kill

    @functools.wraps(send)
    def told(pid: int, number: int) -> None:
        with contextlib.suppress(Exception):
            if number and pid != os.getpid():
                _note(pid, number)
        send(pid, number)

    os.kill = told


def _note(pid: int, number: int) -> None:
    folder = failure.own_folder()
    if folder is not None:
        name = signal.Signals(number).name
        _sent.append({"at_ns": time.time_ns(), "pid": pid, "signal": name, "where": failure.called_from()})
        wire.write_record(folder / wire.SENT, {"sent": list(_sent)})
