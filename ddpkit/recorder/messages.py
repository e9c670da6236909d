"""Keeps what no recorder has: with which rank each send and receive is, from or to which a collective is, and what number a rank
brings to one of a single number."""

from __future__ import annotations

import bisect
import contextlib
import sys
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from . import failure

MOST = 2000
# To sum these up takes some microseconds.
MOST_SUMMED = 32_768
PLAIN = (str, int, float, bool, type(None))
OF_OBJECTS = ("all_gather_object", "broadcast_object_list")
# The arguments of a collective that are looked at.
ASKED = ("dst", "src", "tensor", "input_tensor", "op", "obj", "object_list", "async_op")

_count = 0
# The last sends and receives that began, and the user's line of each.
_exchanged: deque[tuple[dict[str, Any], dict[str, Any] | None]] = deque(maxlen=MOST)
# The rank with which a send or receive is under way, or failed.
under_way_with: int | None = None
_requests: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@dataclass
class Called:
    """A call of a collective from or to rank `root`, with `brings`, this rank's number; `reduces`: what is made of all numbers,
    as in `Collective`. `async_op`: it does not wait for its end. When it began and was over, 0 while it is not; `waited`:
    until the collective had ended or failed (of NCCL's, only its stream waits)."""

    began_ns: int
    op: str
    root: int | None
    brings: float | None
    reduces: str
    async_op: bool
    over_ns: int = 0
    waited: bool = False

    def end(self, error: BaseException | None = None) -> None:
        """It has come back, or by `error`: one of the collective itself, or what broke off the wait, as an alarm does."""
        self.over_ns = time.time_ns()
        self.waited = not self.async_op and (error is None or isinstance(error, RuntimeError))


_called: deque[Called] = deque(maxlen=MOST)


def begin_exchange(op: str, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """A send or receive begins; `asked` are its arguments. The record of it, None for a part of another one."""
    global under_way_with
    under_way_with = _other_rank(asked)
    frame: FrameType | None = sys._getframe(1)
    while frame and not failure.is_users_own(frame.f_code.co_filename):
        if frame.f_code.co_name in ("send", "recv"):
            # The one that this is a part of is there already.
            return None
        frame = frame.f_back
    line = (
        {"filename": frame.f_code.co_filename, "line": frame.f_lineno, "name": frame.f_code.co_name} if frame else None
    )
    record = {"at_ns": time.time_ns(), "op": op, "peer": under_way_with, "tag": asked.get("tag", 0)}
    _exchanged.append((record, line))
    return record


def end_exchange(record: dict[str, Any] | None, given: Any, outer: int | None) -> None:
    """Count it, and be again in the one around it, with rank `outer`. Of one that goes on by itself, keep the other rank for as
    long as the program keeps `given`, its handle, and note when that is gone; a receive of whichever rank sends gives it."""
    global _count, under_way_with
    if record and record["peer"] is None and isinstance(given, int):
        record["peer"] = given
    with contextlib.suppress(TypeError):
        if under_way_with is not None and hasattr(given, "is_completed"):
            _requests[given] = under_way_with
    _count, under_way_with = _count + 1, outer


def exchanges() -> int:
    """How many sends and receives have been made."""
    return _count


def exchanged() -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """The last sends and receives as records, oldest first, each with the user's line that it came from."""
    return list(_exchanged)


def requested() -> list[int]:
    """The ranks with which a send or receive is under way or was begun and not waited for; gloo's end when they are."""
    begun = set() if under_way_with is None else {under_way_with}
    with contextlib.suppress(Exception):
        begun |= {other for work, other in list(_requests.items()) if not work.is_completed()}
    return sorted(begun)


def begin_call(op: str, asked: Mapping[str, Any]) -> Called:
    """A call of a collective begins; `asked` are those of its arguments that are named in `ASKED`. To be ended by its `end()`."""
    reduces = getattr(asked.get("op"), "name", "SUM") if op == "all_reduce" else "object" if op in OF_OBJECTS else ""
    async_op = bool(asked.get("async_op"))
    call = Called(time.time_ns(), op, _other_rank(asked), _number_of(op, asked), reduces, async_op)
    _called.append(call)
    return call


def calls() -> Callable[[str, int], list[Called]]:
    """A function that tells the calls during which a collective came, the outermost first, by its name and when the recorder
    dates it. What torch itself calls in C++, as DDP does, came during none; of threads that call at once, each may be the one."""
    kept = list(_called)

    def calls_of(op: str, created_ns: int) -> list[Called]:
        until = bisect.bisect(kept, created_ns, key=lambda call: call.began_ns)
        # One of objects is two of tensors, their sizes and they, in calls of its own.
        recent = [call for call in kept[max(until - 3, 0) : until] if created_ns <= (call.over_ns or created_ns)]
        return [call for call in recent if call.op in (op, *OF_OBJECTS)]

    return calls_of


def _other_rank(asked: Mapping[str, Any]) -> int | None:
    """The global rank that a call goes to or comes from, by its arguments; None where they name none."""
    other: int | None = asked.get("dst", asked.get("src"))
    within = asked.get("group_dst", asked.get("group_src"))
    if other is None and within is not None:
        with contextlib.suppress(Exception):
            other = sys.modules["torch.distributed"].get_global_rank(asked["group"], within)
    return other


def _number_of(op: str, asked: Mapping[str, Any]) -> float | None:
    """The number that this rank brings to a collective of these arguments, or the sum of those; None where it brings too many, or
    has them on a GPU, for which one would have to wait. Of an object, the checksum of a plain one."""
    with contextlib.suppress(Exception):
        if op in OF_OBJECTS:
            told = asked["obj" if "obj" in asked else "object_list"]
            return float(zlib.crc32(repr(told).encode())) if isinstance(told, PLAIN) else None
        tensor = asked["tensor"] if "tensor" in asked else asked["input_tensor"]
        if (op.startswith("all_") or op == "broadcast") and tensor.device.type == "cpu":
            if tensor.numel() == 1:
                return float(tensor.detach().item())
            if 1 < tensor.numel() <= MOST_SUMMED:
                return float(tensor.detach().sum(dtype=sys.modules["torch"].float64))
    return None
