"""Keeps which keys of a store the program asks for and sets, in turn: the store itself tells nobody."""

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

# The last such calls from lines of the user's own, and the line of each.
_called: deque[tuple[dict[str, Any], dict[str, Any]]] = deque(maxlen=MOST)
_set_beside: deque[tuple[dict[str, Any], dict[str, Any]]] = deque(maxlen=MOST)
_under_way: list[str] = []


def watched(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, a method of torch's stores, with a note of its key where the program itself calls it, rather than torch."""
    op = call.__name__

    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        code, line = sys._getframe(1).f_code, sys._getframe(1).f_lineno
        # A thread beside the main one that waits for a key holds nobody up; what it sets, others may wait for.
        beside = threading.current_thread() is not threading.main_thread()
        if (beside and op != "set") or not failure.is_users_own(code.co_filename):
            return call(*args, **kwargs)
        asked = args[1] if len(args) > 1 else next(iter(kwargs.values()), "")
        keys = [asked] if isinstance(asked, str) else list(map(str, asked))
        where = {"filename": code.co_filename, "line": line, "name": code.co_name}
        (_set_beside if beside else _called).append(({"at_ns": time.time_ns(), "op": op, "keys": keys}, where))
        if op == "set":
            return call(*args, **kwargs)
        _under_way[:] = keys
        try:
            return call(*args, **kwargs)
        finally:
            _under_way.clear()

    return noted


def called() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The last calls as records, oldest first, each with the user's line that it came from."""
    return list(_called)


def set_beside() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """As `called`, what threads beside the main one have set: in no order with the calls of that."""
    return list(_set_beside)


def awaited() -> list[str]:
    """The keys that this rank waits for just now."""
    return list(_under_way)
