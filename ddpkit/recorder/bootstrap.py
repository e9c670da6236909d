"""Arms the recorder in a rank, then runs the user's script as `__main__`.

`processes/keeper.py` starts it as `python -u bootstrap.py [-m] target args...`; in a warm start, `forked.py` calls
`become` instead. Nothing here imports torch.
"""

from __future__ import annotations

import os
import sys

PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if __name__ == "__main__":
    sys.path[0] = PACKAGE_PARENT

import atexit  # noqa: E402
import builtins  # noqa: E402
import contextlib  # noqa: E402
import faulthandler  # noqa: E402
import functools  # noqa: E402
import importlib.util  # noqa: E402
import signal  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from types import ModuleType  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

from ddpkit.recorder import abort, collectives, failure, replicas, signals, steps, store_keys, watched_calls  # noqa: E402
from ddpkit.runfolder import wire  # noqa: E402

# Unused by Slurm, Lightning and Python, which use SIGUSR1.
STACK_SIGNAL = signal.SIGRTMIN + 10


def become(arguments: list[str], warm: bool = False) -> NoReturn:
    """Arm the recorder, run `[-m] target args...` as python would, and end the process."""
    arm(warm)
    as_module = arguments[0] == "-m"
    target, sys.argv = arguments[as_module], arguments[as_module:]
    # As python does for `-m name` and for `script.py`.
    sys.path.insert(0, os.getcwd() if as_module else os.path.dirname(os.path.abspath(target)))
    if PACKAGE_PARENT not in sys.path:
        sys.path.append(PACKAGE_PARENT)
    leave(run(target, as_module))


def run(target: str, as_module: bool) -> int:
    """Run the target; returns python's exit code, or minus the signal that python would die of."""
    try:
        run_module(target) if as_module else run_script(target)
    except SystemExit as error:
        failure.note(error)
        if not error.code:
            say_finished(failure.described(error)["where"])
        else:
            collectives.note()
        if isinstance(error.code, int | None):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        failure.note(error)
        collectives.note()
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    say_finished()
    return 0


def leave(code: int) -> NoReturn:
    """End the process like a multiprocessing child: join threads, run exit functions, skip the teardown.

    A torch thread that still frees tensors, and asks for the GIL during the interpreter's teardown, aborts the process
    ("terminate called without an active exception"), now and then, after a good run.
    """
    keyed = list(store_keys.called)
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    if list(store_keys.called) != keyed:
        collectives.note()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            code = code or 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    failure.leave_at_once(code & 0xFF)


def arm(warm: bool) -> None:
    """Record this rank's start, and have its crashes, stacks and failures written into its folder."""
    for name in ("PYTHON_EXEC", wire.ENV_ZYGOTE, *(n for n in os.environ if n.startswith("PET_"))):
        os.environ.pop(name, None)
    folder = wire.own_rank_folder()
    if folder is None:
        return
    failure.this_process_is_the_rank()
    _be_child_of_torchrun(os.environ.pop(wire.ENV_AGENT, ""))
    sys.excepthook = failure.print_uncaught
    sys.breakpointhook = failure.no_keyboard
    builtins.input = failure.no_keyboard
    _have_leaving_told()
    signals.arm()
    watched_calls.arm()
    steps.arm()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        faulthandler.enable(_kept_open(folder / wire.CRASH), all_threads=True)
        abort.arm(collectives.note)
        # By default an alarm ends a process without an error message.
        faulthandler.register(signal.SIGALRM, _kept_open(folder / wire.CRASH), all_threads=False, chain=True)
        # Only the main thread: walking the stack of a running thread may crash the process. py-spy reads the others.
        faulthandler.register(STACK_SIGNAL, _kept_open(folder / wire.STACK), all_threads=False, chain=False)
        wire.write_record(folder / wire.STARTED, started(warm))


def _be_child_of_torchrun(agent: str) -> None:
    """Have `os.getppid()` return torchrun's pid, as without ddpkit: programs use it to name what ranks share."""
    keeper, parent = os.getppid(), os.getppid
    if agent:
        os.getppid = lambda: int(agent) if parent() == keeper else parent()


def _have_leaving_told() -> None:
    """Have `os._exit` and `os.abort` write a record first: no Python code runs after them."""
    abort_at_once = os.abort

    @functools.wraps(os._exit)
    def leaving(status: int) -> NoReturn:
        with contextlib.suppress(Exception):
            if status:
                failure.note_leaving("os._exit", f"exit code {status}")
                collectives.note()
            else:
                say_finished(failure.called_from())
        failure.leave_at_once(status)

    @functools.wraps(os.abort)
    def aborting() -> NoReturn:
        with contextlib.suppress(Exception):
            failure.note_leaving("os.abort", "SIGABRT")
            collectives.note()
        abort_at_once()

    os._exit, os.abort = leaving, aborting


def started(warm: bool) -> dict[str, object]:
    """This rank's first record; it has the stack signal, because the handler is now in place."""
    env = os.environ
    return {
        "at_ns": time.time_ns(),
        "pid": os.getpid(),
        "rank": int(env["RANK"]),
        "local_rank": int(env.get("LOCAL_RANK", "0")),
        "node": env.get(wire.ENV_NODE, ""),
        "world_size": int(env.get("WORLD_SIZE", "1")),
        "stack_signal": int(STACK_SIGNAL),
        "warm": warm,
        "master": f"{env.get('MASTER_ADDR', '')}:{env.get('MASTER_PORT', '')}",
    }


def say_finished(left_at: dict[str, Any] | None = None) -> None:
    """Record that the script ended, or left with exit code 0 at the line `left_at`."""
    failure.record(wire.FINISHED, {"at_ns": time.time_ns(), "left_at": left_at})
    collectives.note()
    steps.finish()
    replicas.note_at_the_end()


def _kept_open(path: Path) -> int:
    """A file descriptor that stays open while the rank lives, for faulthandler to write to."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def run_script(path: str) -> None:
    """Run the file at `path` as `__main__`; `__spec__` is None as with python, so spawned workers find it."""
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, fresh_main(__file__=path, __cached__=None).__dict__)


def run_module(name: str) -> None:
    """Run module `name` as `__main__`, as `python -m` does."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    code = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    sys.argv[0] = spec.origin or name
    exec(code, fresh_main(__spec__=spec, __file__=spec.origin, __package__=spec.parent).__dict__)


def fresh_main(**names: object) -> ModuleType:
    """A new `__main__` module, which replaces this file's."""
    module = ModuleType("__main__")
    module.__dict__.update({"__builtins__": builtins, "__spec__": None, "__package__": None, **names})
    sys.modules["__main__"] = module
    return module


if __name__ == "__main__":
    sys.path.pop(0)
    become(sys.argv[1:])
