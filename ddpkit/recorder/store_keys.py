"""Keeps which store keys the program waits for and sets, in order."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from . import failure

WATCHED = ("get", "set", "wait")
MOST = 200

# The last calls of the user's own lines, each with its line: of the main thread, and what other threads have set.
called: deque[tuple[dict[str, Any], dict[str, Any]]] = deque(maxlen=MOST)
set_beside: deque[tuple[dict[str, Any], dict[str, Any]]] = deque(maxlen=MOST)
# The keys that the main thread waits for now.
awaited: list[str] = []


def watched(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, a store's method, which records its keys when the user's code calls it."""
    op = call.__name__

    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        code, line = sys._getframe(1).f_code, sys._getframe(1).f_lineno
        # A wait in another thread than the main one holds nobody up, but others may wait for what it sets.
        beside = threading.current_thread() is not threading.main_thread()
        if (beside and op != "set") or not failure.is_users_own(code.co_filename):
            return call(*args, **kwargs)
        asked = args[1] if len(args) > 1 else next(iter(kwargs.values()), "")
        keys = [asked] if isinstance(asked, str) else list(map(str, asked))
        where = {"filename": code.co_filename, "line": line, "name": code.co_name}
        (set_beside if beside else called).append(({"at_ns": time.time_ns(), "op": op, "keys": keys}, where))
        if op == "set":
            return call(*args, **kwargs)
        awaited[:] = keys
        try:
            return call(*args, **kwargs)
        finally:
            awaited.clear()

    return noted
