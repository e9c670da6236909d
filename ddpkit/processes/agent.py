"""Starts a job's torchrun agent under a keeper and stops it by a ladder that speaks; leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpkit.errors import LaunchError
from ddpkit.runfolder import wire

from . import zygote

KEEPER = Path(__file__).with_name(wire.KEEPER_FILE)
BALLAST_BYTES = 256 * 1024


@dataclass(frozen=True)
class Start:
    """How a job's agent is to be started: torchrun's command line in `env`, warm unless `cold_because` says why not.

    `folders` are those the job imports from, `variables` those it may set before it imports torch, `base_env` is what a
    new zygote would start with, and `patience_s` how long one that is still importing torch is waited for.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    cold_because: str
    folders: Sequence[str] = ()
    variables: Sequence[str] = ()
    base_env: Mapping[str, str] = field(default_factory=dict)
    patience_s: float = 0.0


def _start_cold(start: Start, log: int) -> subprocess.Popen[bytes]:
    """The keeper outlives neither this process nor its agent; a session of its own keeps Ctrl-C from reaching it."""
    command = [sys.executable, "-I", "-S", str(KEEPER), "agent", str(os.getpid()), *start.command]
    return subprocess.Popen(
        command, env=dict(start.env), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )


class Job:
    """A running torchrun job. `ended` is set by the watcher once every process is gone and what is known is final,
    `over` when whoever shows the job has been told as well.

    `end` is what ddpkit itself knows of the end: {"reason": "", "notes": [...], "keeper_exitcode": int}.
    """

    def __init__(self, folder: Path, start: Start) -> None:
        self.folder = folder
        self.ended, self.over = threading.Event(), threading.Event()
        self.end: dict[str, Any] = {"reason": "", "notes": []}
        self.cold_because = start.cold_because
        self._lock = threading.Lock()
        self._write_rank_python()
        with open(folder / wire.AGENT_LOG, "wb") as log:
            self._keeper = self._start_warm(start, log.fileno()) or _start_cold(start, log.fileno())
        self.started = time.monotonic()

    def _write_rank_python(self) -> None:
        """The executable that torchrun starts in place of a rank's python, by way of PYTHON_EXEC."""
        shim = self.folder / wire.RANK_PYTHON
        python = f'exec "{sys.executable}" -I -S'
        shim.write_text(
            "#!/bin/sh\n"
            f'[ "${wire.ENV_ZYGOTE}" ] && {python} -c \'{wire.CLIENT}\' "{KEEPER.parent}" "${wire.ENV_ZYGOTE}" "$@"\n'
            f'{python} "{KEEPER}" rank "$@"\n',
            encoding="utf-8",
        )
        shim.chmod(0o755)
        (self.folder / wire.BALLAST).write_bytes(os.urandom(BALLAST_BYTES))
        if not os.access(shim, os.X_OK):
            raise LaunchError(
                f"launch: {self.folder} does not allow programs to be started from it; set {wire.ENV_HOME} to a folder that does."
            )

    def _start_warm(self, start: Start, log: int) -> zygote.ForkedKeeper | None:
        """The agent's keeper, forked from the zygote; None, with `cold_because` set, where that cannot be."""
        if self.cold_because:
            return None
        try:
            agent = zygote.Agent(start.command, start.env, start.folders, start.variables, log)
            return zygote.fork_agent(agent, start.base_env, start.patience_s)
        except zygote.Declined as declined:
            self.cold_because = str(declined)
            return None

    @property
    def running(self) -> bool:
        """Whether the keeper, and so perhaps anything below it, is still there."""
        return self._keeper.poll() is None

    def exit_fd(self) -> int | None:
        """A file descriptor that becomes readable when the job's processes are gone; None where the system has none."""
        if isinstance(self._keeper, zygote.ForkedKeeper):
            return self._keeper.exit_fd()
        try:
            return os.pidfd_open(self._keeper.pid)
        except (AttributeError, OSError):
            return None

    def stop(self, reason: str) -> None:
        """Begin to end the job; returns at once. `reason`: stopped, timeout or stall. The first reason stands."""
        with self._lock:
            if self.end["reason"] or not self.running:
                return
            self.end["reason"] = reason
            with contextlib.suppress(ProcessLookupError):
                self._keeper.send_signal(signal.SIGTERM)

    def note(self, text: str) -> None:
        """Keep `text` among the run's notes, once."""
        if text not in self.end["notes"]:
            self.end["notes"].append(text)

    def finish(self) -> None:
        """Called by the watcher when the keeper has gone: write down what ddpkit knows of the end."""
        self.end["keeper_exitcode"] = self._keeper.wait()
        (self.folder / wire.BALLAST).unlink(missing_ok=True)
        try:
            wire.write_record(self.folder / wire.END, self.end)
        except OSError as error:
            self.note(f"the run folder could not be written to the end: {error.strerror}; output may be cut.")
        self.ended.set()


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for signal `number`; True where the system does not tell.

    One that has started itself anew by exec has none any more, and would die of it.
    """
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
            caught = next(line for line in status if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return True
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def signal_rank(pid: int, number: int) -> bool:
    """Send signal `number` to a rank's process; False where it is gone."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
