"""Writes down how a rank failed: when, to the nanosecond, with what, and at which of the user's own lines."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ddpkit.runfolder import wire

# Larger tensors are not searched for nan.
MOST_SEARCHED = 1_000_000

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_ranks_own_pid = 0
_ranks_own_folder: Path | None = None
_spare: int | None = None
# On an exception itself, when it was first seen: to keep the exception would keep all that its frames hold.
_FIRST_SEEN, _LET_GO = "_ddpkit_first_seen_ns", "_ddpkit_let_go"
# As it was before a rank's own tells from where it was called.
leave_at_once = os._exit


def note(error: BaseException) -> None:
    """Stamp `error` now and write it down; called where an exception is seen before its cause is cleaned away.

    A rank that raises closes its sockets on the way out, and its peers then fail at once. The stamp is therefore
    taken as early as it can be, and kept when the same exception is met again.
    """
    folder = own_folder()
    if folder is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return
    stamp(error)
    _write(folder, lambda: {"at_ns": vars(error)[_FIRST_SEEN], "let_go": vars(error)[_LET_GO], **described(error)})


def stamp(error: BaseException | None, lets_go: bool = False) -> None:
    """Keep when `error`, if there is one, was first seen, and whether the others go on from there: at a barrier, say."""
    if error is not None:
        vars(error).setdefault(_FIRST_SEEN, time.time_ns())
        vars(error).setdefault(_LET_GO, lets_go)


def note_leaving(by: str, message: str) -> None:
    """Write down that this thread is about to leave `by` `os._exit` or `os.abort`, and the exception that it handles, if any.

    A thread of the program's own may end the rank while the main thread waits; `frames` say where that was.
    """
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
    """The exception that the main thread handles just now, in an `except` or `finally`, with the line that raised it; None where
    it handles none."""
    found: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    # Python 3.11 has all three of `sys.exc_info()`.
    error = found[1] if isinstance(found, tuple) else found
    if error is None:
        return None
    frames = [_frame(f) for f in _own_traceback(error.__traceback__)]
    return {"type": type(error).__name__, "message": _text_of(error)[:2_000], "where": _innermost_own(frames)}


def _write(folder: Path, described_as: Callable[[], dict[str, Any]]) -> None:
    _hand_back_the_spare()
    for _attempt in range(2):
        # torch's handler of SIGCHLD raises, for a loader's worker that died, in whatever the rank runs just then.
        with contextlib.suppress(Exception):
            wire.write_record(folder / wire.FAILURE, described_as())
            return


def this_process_is_the_rank() -> None:
    """From here on failures are noted: those of this process, not of the ones that it forks.

    The folder is the one of the rank that torchrun started, whatever the script makes of `RANK` later.
    """
    global _ranks_own_pid, _ranks_own_folder, _spare
    _ranks_own_pid, _ranks_own_folder = os.getpid(), wire.own_rank_folder()
    _spare = os.open(os.devnull, os.O_RDONLY)


def _hand_back_the_spare() -> None:
    """Make room for one open file, in a rank that may have failed for want of any."""
    global _spare
    if _spare is not None:
        os.close(_spare)
        _spare = None


def own_folder() -> Path | None:
    """The folder for this rank's records; None in a process that the rank forked, whose end is not the rank's."""
    return _ranks_own_folder if os.getpid() == _ranks_own_pid else None


def described(error: BaseException) -> dict[str, Any]:
    """`error` as a record: type, message, the chain behind it, its frames, and the user's own line."""
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
        # What the ranks found out together names those at fault; the others raise it too, as a consequence.
        "at_fault": list(getattr(error, "at_fault", ())),
    }


def _nan_in(traceback: TracebackType | None) -> list[str]:
    """The variables of the user's own functions that hold nan, as numbers or small tensors, the innermost function's first."""
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
        # To look at a tensor of another kind may take a collective.
        if torch and type(value) in (torch.Tensor, torch.nn.Parameter):
            return value.device.type == "cpu" and value.numel() <= MOST_SEARCHED and bool(value.detach().isnan().any())
    return False


def _only_one_in(error: BaseException) -> BaseException:
    """What a group of one exception holds, as of a TaskGroup with one failed task: the group itself says only how many."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def trimmed(traceback: TracebackType | None) -> TracebackType | None:
    """`traceback` without the frames of ddpkit that lead into the user's code."""
    while traceback is not None and _is_ddpkits(traceback.tb_frame.f_code.co_filename):
        traceback = traceback.tb_next
    return traceback


def _is_ddpkits(file: str) -> bool:
    return file.startswith((_PACKAGE, "<frozen ")) or os.path.basename(file) == wire.FUNCTION_SCRIPT


def _own_traceback(traceback: TracebackType | None) -> list[Any]:
    import traceback as tb

    return list(tb.extract_tb(trimmed(traceback)))


def _stack(frame: FrameType | None) -> list[dict[str, Any]]:
    """The frames of a thread, outermost first, without those of ddpkit."""
    import traceback as tb

    return [_frame(f) for f in tb.extract_stack(frame) if not _is_ddpkits(f.filename)]


def called_from() -> dict[str, Any] | None:
    """The user's own line that this thread is in, as a record."""
    return _innermost_own(_stack(sys._getframe(1)))


def _innermost_own(frames: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((f for f in reversed(frames) if f["own"]), None)


def _printed(error: BaseException) -> str:
    import traceback as tb

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
    if file.startswith("<") and not file.startswith("<ipython"):
        return False
    return not file.startswith((_PACKAGE, *_installed()))


@cache
def _installed() -> tuple[str, ...]:
    return tuple({sysconfig.get_paths()[k] + os.sep for k in ("stdlib", "platstdlib", "purelib", "platlib")})


def _chain(error: BaseException) -> list[BaseException]:
    """What `error` was raised from or while handling, nearest first, `from None` too: what the rank had met before counts, if
    the program hides it or not. `error` itself is not in it."""
    found: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and len(found) < 10:
        at = at.__cause__ or at.__context__
        if at is not None:
            found.append(at)
    return found


def _as_chain(errors: list[BaseException]) -> list[dict[str, str]]:
    return [{"type": type(e).__name__, "message": _text_of(e)[:2_000]} for e in errors]


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def _text_of_exit(error: SystemExit) -> str:
    # Anything but a number is printed, and the exit code is 1.
    return f"exit code {error.code}" if isinstance(error.code, int) else str(error.code)


def _syntax_error_place(error: BaseException) -> dict[str, Any] | None:
    if not isinstance(error, SyntaxError):
        return None
    source = (error.text or "").strip()
    return {"file": error.filename, "line": error.lineno, "function": "<module>", "source": source, "own": True}


def no_keyboard(*_: object, **__: object) -> Any:
    """Stands in for `input` and `breakpoint` in a rank, whose stdin is empty."""
    raise EOFError(
        f"rank {os.environ.get('RANK', '?')} asked for keyboard input, but the ranks of a job have no keyboard. "
        "Pass the value in args= or env=; to look inside, print, or read run.ranks[i].stack."
    )


def print_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """The excepthook of a rank: as Python prints it, without ddpkit's frames and with the source lines of cells."""
    import traceback as tb

    tb.print_exception(kind, error, trimmed(traceback))
