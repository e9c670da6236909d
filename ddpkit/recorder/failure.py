"""Writes down how a rank failed: when, with what, and at which of the user's lines."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import sysconfig
import threading
import time
import traceback as tb
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ddpkit.runfolder import wire

# Larger tensors are not searched for nan.
MOST_SEARCHED = 1_000_000

_NO_GRADIENT = re.compile(r"which did not receive grad for rank \d+: (?P<numbers>[\d ]*)(?P<names>[^\d\s][^\n]*)?")
_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_ranks_own_pid = 0
_ranks_own_folder: Path | None = None
_spare: int | None = None
# Set on the exception itself: to keep a reference to it would keep all that its frames hold.
_FIRST_SEEN, _LET_GO = "_ddpkit_first_seen_ns", "_ddpkit_let_go"
# The original: in a rank `os._exit` writes a record first.
leave_at_once = os._exit


def note(error: BaseException) -> None:
    """Write down `error` with the time when it was first seen.

    A rank that raises closes its sockets on the way out, and its peers then fail at once. So the time is taken as early
    as possible, and kept when the same exception comes again.
    """
    folder = own_folder()
    if folder is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return
    stamp(error)
    _write(folder, lambda: {"at_ns": vars(error)[_FIRST_SEEN], "let_go": vars(error)[_LET_GO], **described(error)})


def stamp(error: BaseException | None, lets_go: bool = False) -> None:
    """Keep when `error` was first seen, and whether the other ranks could then go on."""
    if error is not None:
        vars(error).setdefault(_FIRST_SEEN, time.time_ns())
        vars(error).setdefault(_LET_GO, lets_go)


def note_leaving(by: str, message: str) -> None:
    """Write down that this thread ends the rank `by` `os._exit` or `os.abort`."""
    folder, main = own_folder(), threading.main_thread()
    if folder is None:
        return
    handled = sys.exc_info()[1]
    stamp(handled)
    record = {
        "at_ns": vars(handled)[_FIRST_SEEN] if handled else time.time_ns(),
        "type": by,
        "message": message,
        "chain": _as_chain([handled, *_chain(handled)] if handled else []),
        "traceback": "",
        "frames": _stack(sys._current_frames().get(main.ident or 0)),
        "where": called_from(),
        "by_thread": threading.current_thread() is not main,
    }
    _write(folder, lambda: record)


def handled_by_main() -> dict[str, Any] | None:
    """The exception that the main thread is handling now, with the line that raised it; or None."""
    found: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    # Python 3.11 returns a tuple as `sys.exc_info()` does.
    error = found[1] if isinstance(found, tuple) else found
    if error is None:
        return None
    frames = [_frame(f) for f in _own_traceback(error.__traceback__)]
    return {"type": type(error).__name__, "message": _text_of(error)[:2_000], "where": _innermost_own(frames)}


def record(name: str, entry: dict[str, Any]) -> None:
    """Write a record into this rank's folder; nothing in any other process."""
    folder = own_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            wire.write_record(folder / name, entry)


def _write(folder: Path, described_as: Callable[[], dict[str, Any]]) -> None:
    _hand_back_the_spare()
    for _attempt in range(2):
        # For a dead loader worker, torch's SIGCHLD handler raises in whatever code the rank is running.
        with contextlib.suppress(Exception):
            wire.write_record(folder / wire.FAILURE, described_as())
            return


def this_process_is_the_rank() -> None:
    """Record failures from here on: of this process, not of its forks, and even if `RANK` is changed."""
    global _ranks_own_pid, _ranks_own_folder, _spare
    _ranks_own_pid, _ranks_own_folder = os.getpid(), wire.own_rank_folder()
    _spare = os.open(os.devnull, os.O_RDONLY)


def _hand_back_the_spare() -> None:
    """Free one file descriptor, in case the rank failed because it had none left."""
    global _spare
    if _spare is not None:
        os.close(_spare)
        _spare = None


def own_folder() -> Path | None:
    """The folder for this rank's records; None outside of a rank, and in a process that it forked."""
    return _ranks_own_folder if os.getpid() == _ranks_own_pid else None


def described(error: BaseException) -> dict[str, Any]:
    """`error` as a record: the fields of `runfolder.failures.Failure`."""
    whole, error = error, _only_one_in(error)
    frames = [_frame(f) for f in _own_traceback(error.__traceback__)]
    message = _text_of_exit(error) if isinstance(error, SystemExit) else _text_of(error)
    return {
        "type": type(error).__name__,
        "message": message[:20_000],
        "chain": _as_chain(_chain(error)),
        "traceback": _printed(whole)[-40_000:],
        "frames": frames,
        "where": _innermost_own(frames) or (frames[-1] if frames else _syntax_error_place(error)),
        "nan_in": _nan_in(trimmed(error.__traceback__)),
        "without_gradient": _without_gradient(message, error.__traceback__),
        "at_fault": list(getattr(error, "at_fault", ())),
    }


def _without_gradient(message: str, traceback: TracebackType | None) -> list[str]:
    """The parameters that got no gradient, by DDP's message; it has only numbers, unless torch's debug level is INFO."""
    said = _NO_GRADIENT.search(message)
    if said is None or said["names"]:
        return said["names"].split(", ") if said else []
    while traceback is not None:
        ddp: Any = traceback.tb_frame.f_locals.get("self")
        with contextlib.suppress(Exception):
            names = ddp._build_debug_param_to_name_mapping(ddp._build_params_for_reducer()[0])
            return [names[int(number)] for number in said["numbers"].split()]
        traceback = traceback.tb_next
    return []


def _nan_in(traceback: TracebackType | None) -> list[str]:
    """The variables of the user's functions that hold nan, innermost function first."""
    found: list[str] = []
    while traceback is not None:
        frame = traceback.tb_frame
        if is_users_own(frame.f_code.co_filename):
            found = [name for name, value in frame.f_locals.items() if _holds_nan(value)] + found
        traceback = traceback.tb_next
    return list(dict.fromkeys(found))


def _holds_nan(value: Any) -> bool:
    with contextlib.suppress(Exception):
        if isinstance(value, float):
            return math.isnan(value)
        torch = sys.modules.get("torch")
        # Reading other kinds of tensors may take a collective.
        if torch and type(value) in (torch.Tensor, torch.nn.Parameter):
            return value.device.type == "cpu" and value.numel() <= MOST_SEARCHED and bool(value.detach().isnan().any())
    return False


def _only_one_in(error: BaseException) -> BaseException:
    """The exception in a group of one, as from a TaskGroup with one failed task; else `error` itself."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def trimmed(traceback: TracebackType | None) -> TracebackType | None:
    """`traceback` without ddpkit's outer frames."""
    while traceback is not None and _is_ddpkits(traceback.tb_frame.f_code.co_filename):
        traceback = traceback.tb_next
    return traceback


def _is_ddpkits(file: str) -> bool:
    return file.startswith((_PACKAGE, "<frozen ")) or os.path.basename(file) == wire.FUNCTION_SCRIPT


def _own_traceback(traceback: TracebackType | None) -> list[Any]:
    return list(tb.extract_tb(trimmed(traceback)))


def _stack(frame: FrameType | None) -> list[dict[str, Any]]:
    """The frames of a thread, outermost first, without those of ddpkit."""
    return [_frame(f) for f in tb.extract_stack(frame) if not _is_ddpkits(f.filename)]


def called_from() -> dict[str, Any] | None:
    """The user's line that this thread is in, as a record."""
    return _innermost_own(_stack(sys._getframe(1)))


def _innermost_own(frames: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((f for f in reversed(frames) if f["own"]), None)


def _printed(error: BaseException) -> str:
    return "".join(tb.format_exception(type(error), error, trimmed(error.__traceback__)))


def _frame(summary: Any) -> dict[str, Any]:
    return {
        "file": summary.filename,
        "line": summary.lineno,
        "function": summary.name,
        "source": (summary.line or "").strip(),
        "own": is_users_own(summary.filename),
    }


def is_users_own(file: str) -> bool:
    """Whether `file` is the user's code rather than Python's, an installed package's or ddpkit's."""
    return not file.startswith((_PACKAGE, *_stdlib())) and not wire.is_installed(file)


@cache
def _stdlib() -> tuple[str, ...]:
    return tuple({sysconfig.get_paths()[k] + os.sep for k in ("stdlib", "platstdlib")})


def _chain(error: BaseException) -> list[BaseException]:
    """What `error` was raised from or while handling, nearest first; `from None` does not hide it here."""
    found: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and len(found) < 10:
        at = at.__cause__ or at.__context__
        if at is not None:
            found.append(at)
    return found


def _as_chain(errors: list[BaseException]) -> list[dict[str, Any]]:
    found = []
    for error in errors:
        where = _innermost_own([_frame(f) for f in _own_traceback(error.__traceback__)])
        found.append({"type": type(error).__name__, "message": _text_of(error)[:2_000], "where": where})
    return found


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def _text_of_exit(error: SystemExit) -> str:
    # Anything that is not a number is printed, and the exit code is 1.
    return f"exit code {error.code}" if isinstance(error.code, int) else str(error.code)


def _syntax_error_place(error: BaseException) -> dict[str, Any] | None:
    if not isinstance(error, SyntaxError):
        return None
    source = (error.text or "").strip()
    return {"file": error.filename, "line": error.lineno, "function": "<module>", "source": source, "own": True}


def no_keyboard(*_: object, **__: object) -> Any:
    """Replaces `input` and `breakpoint` in a rank, whose stdin is empty."""
    raise EOFError(
        f"rank {os.environ.get('RANK', '?')} asked for keyboard input, but the ranks of a job have no keyboard. "
        "Pass the value in args= or env=; to look inside, print, or read run.ranks[i].stack."
    )


def print_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """A rank's excepthook: prints as Python does, without ddpkit's frames."""
    tb.print_exception(kind, error, trimmed(traceback))
