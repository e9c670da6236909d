"""Writes down the signals that this rank sends, and from which line; and when its own SIGTERM handler runs."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ddpkit.runfolder import wire

from . import failure

MOST = 16
_HANDLER = "_ddpkit_handler"

_sent: deque[dict[str, Any]] = deque(maxlen=MOST)


def arm() -> None:
    """Have `os.kill` record what it sends, also when a package calls it, and a handler of SIGTERM that it runs."""
    _have_handler_told()
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


def _have_handler_told() -> None:
    """Have a SIGTERM handler that the program installs record its start and end; the program sees its own function only."""
    install, installed = signal.signal, signal.getsignal

    @functools.wraps(install)
    def installing(number: int, handler: Any) -> Any:
        return _own(install(number, _told(handler) if number == signal.SIGTERM and callable(handler) else handler))

    @functools.wraps(installed)
    def asking(number: int) -> Any:
        return _own(installed(number))

    signal.signal, signal.getsignal = installing, asking  # type: ignore[assignment]


def _own(handler: Any) -> Any:
    return getattr(handler, _HANDLER, handler)


def _told(handler: Callable[[int, Any], Any]) -> Callable[[int, Any], None]:
    def handling(number: int, frame: Any) -> None:
        record = {"at_ns": time.time_ns(), "name": getattr(handler, "__name__", ""), "over_ns": 0}
        with contextlib.suppress(Exception):
            failure.record(wire.HANDLER, record)
        try:
            handler(number, frame)
        finally:
            with contextlib.suppress(Exception):
                failure.record(wire.HANDLER, {**record, "over_ns": time.time_ns()})

    setattr(handling, _HANDLER, handler)
    return handling
