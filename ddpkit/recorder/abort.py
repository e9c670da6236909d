"""Has a rank write down what it knows before C++ aborts it, as gloo does when a message comes for which it has no room."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Callable
from typing import Any

# ctypes keeps none of its own of what C may call.
_kept: list[Any] = []


def arm(note: Callable[[], None]) -> None:
    """Have `note` called when a thread of C++ aborts this process, which then dies as it would have.

    Python's own handlers are of no use here: they run in the main thread, some time later, and there is no later. This one
    runs in the thread that aborts, once that gets the GIL: where another one never gives it up, the process stays, and is told
    of as one that stands still. Whoever handled SIGABRT before, as faulthandler does, comes after it.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)

    def aborted(number: int) -> None:
        libc.signal(number, before)
        # What aborts in a thread of Python's may have broken the heap that Python needs.
        if threading.get_ident() not in {thread.ident for thread in threading.enumerate()}:
            with contextlib.suppress(Exception):
                note()
        # It comes once this handler has returned; abort() itself would not ask a handler again.
        getattr(libc, "raise")(number)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
    _kept.append(handler)
    before = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
