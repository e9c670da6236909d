"""Lets a rank write its records before C++ aborts it, as gloo may do."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Callable
from typing import Any

# ctypes keeps no reference to what C may call.
_kept: list[Any] = []


def arm(note: Callable[[], None]) -> None:
    """Have `note` called when a C++ thread aborts this process, which then dies as before.

    A Python handler would be too late: it runs in the main thread afterwards. This one runs in the aborting thread, once
    that has the GIL; if another thread never releases it, the job stalls and is reported as such. An earlier handler
    of SIGABRT, such as faulthandler's, runs after it.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)

    def aborted(number: int) -> None:
        libc.signal(number, before)
        # An abort in a Python thread may have broken the heap that Python needs.
        if threading.get_ident() not in {thread.ident for thread in threading.enumerate()}:
            with contextlib.suppress(Exception):
                note()
        # This signal comes after the handler has returned; abort() itself would not call a handler again.
        getattr(libc, "raise")(number)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
    _kept.append(handler)
    before = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
