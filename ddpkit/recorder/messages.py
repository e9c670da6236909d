"""Keeps what torch's recorder lacks: the peer of a message, a collective's root, and this rank's number."""

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
# Summing up so many values takes some microseconds.
MOST_SUMMED = 32_768
PLAIN = (str, int, float, bool, type(None))
OF_OBJECTS = ("all_gather_object", "broadcast_object_list")
# The arguments of a collective that are read.
ASKED = ("dst", "src", "tensor", "input_tensor", "op", "obj", "object_list", "async_op")

# How many sends and receives there were, and the last ones, each with the user's line.
exchanges = 0
exchanged: deque[tuple[dict[str, Any], dict[str, Any] | None]] = deque(maxlen=MOST)
# The peer of the send or receive that is under way or failed.
under_way_with: int | None = None
_requests: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@dataclass
class Called:
    """A call of a collective; `root`, `brings` and `reduces` are as in `runfolder.calls.Collective`.

    `over_ns` is 0 until it has come back. `waited`: it came back because the collective had ended or failed; with NCCL
    only the stream waits.
    """

    began_ns: int
    op: str
    root: int | None
    brings: float | None
    reduces: str
    async_op: bool
    over_ns: int = 0
    waited: bool = False

    def end(self, error: BaseException | None = None) -> None:
        """Note that the call came back, perhaps by `error`: the collective's own, or an alarm's, say."""
        self.over_ns = time.time_ns()
        self.waited = not self.async_op and (error is None or isinstance(error, RuntimeError))


_called: deque[Called] = deque(maxlen=MOST)


def begin_exchange(op: str, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """Record that a send or receive with arguments `asked` begins; None if another one made this call."""
    global under_way_with
    under_way_with = _other_rank(asked)
    frame: FrameType | None = sys._getframe(1)
    while frame and not failure.is_users_own(frame.f_code.co_filename):
        if frame.f_code.co_name in ("send", "recv"):
            # `recv` called `irecv`, and is recorded already.
            return None
        frame = frame.f_back
    line = (
        {"filename": frame.f_code.co_filename, "line": frame.f_lineno, "name": frame.f_code.co_name} if frame else None
    )
    record = {"at_ns": time.time_ns(), "op": op, "peer": under_way_with, "tag": asked.get("tag", 0)}
    exchanged.append((record, line))
    return record


def end_exchange(record: dict[str, Any] | None, given: Any, outer: int | None) -> None:
    """Count a send or receive that returned `given`: a handle, with which the peer is kept, or a rank.

    `outer` is the peer of the call around it; a `recv` from any rank returns the peer.
    """
    global exchanges, under_way_with
    if record and record["peer"] is None and isinstance(given, int):
        record["peer"] = given
    with contextlib.suppress(TypeError):
        if under_way_with is not None and hasattr(given, "is_completed"):
            _requests[given] = under_way_with
    exchanges, under_way_with = exchanges + 1, outer


def requested() -> list[int]:
    """The peers of sends and receives that are under way or not yet waited for."""
    begun = set() if under_way_with is None else {under_way_with}
    with contextlib.suppress(Exception):
        begun |= {other for work, other in list(_requests.items()) if not work.is_completed()}
    return sorted(begun)


def begin_call(op: str, asked: Mapping[str, Any]) -> Called:
    """Record that a collective begins; `asked` are its arguments named in `ASKED`. Call `end()` on the result."""
    reduces = getattr(asked.get("op"), "name", "SUM") if op == "all_reduce" else "object" if op in OF_OBJECTS else ""
    async_op = bool(asked.get("async_op"))
    call = Called(time.time_ns(), op, _other_rank(asked), _number_of(op, asked), reduces, async_op)
    _called.append(call)
    return call


def calls() -> Callable[[str, int], list[Called]]:
    """A function from a collective's name and time to the calls that made it, outermost first.

    No call makes a collective of DDP, which is made in C++. If two threads call at once, both calls are given.
    """
    kept = list(_called)

    def calls_of(op: str, created_ns: int) -> list[Called]:
        until = bisect.bisect(kept, created_ns, key=lambda call: call.began_ns)
        # A collective of objects calls two of tensors: their sizes and their bytes.
        recent = [call for call in kept[max(until - 3, 0) : until] if created_ns <= (call.over_ns or created_ns)]
        return [call for call in recent if call.op in (op, *OF_OBJECTS)]

    return calls_of


def _other_rank(asked: Mapping[str, Any]) -> int | None:
    """The global rank that a call goes to or comes from, by its arguments; None if they name none."""
    other: int | None = asked.get("dst", asked.get("src"))
    within = asked.get("group_dst", asked.get("group_src"))
    if other is None and within is not None:
        with contextlib.suppress(Exception):
            other = sys.modules["torch.distributed"].get_global_rank(asked["group"], within)
    return other


def _number_of(op: str, asked: Mapping[str, Any]) -> float | None:
    """This rank's number for a collective, their sum, or the checksum of a plain object.

    None if there are too many numbers, or if they are on a GPU, for which it would have to wait.
    """
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
