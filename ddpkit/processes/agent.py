"""Starts a job's torchrun agents under keepers, and stops everything below them."""

from __future__ import annotations

import abc
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpkit.errors import LaunchError
from ddpkit.runfolder import wire

from .zygote import Declined, ForkedKeeper, Start, fork_agent

KEEPER = Path(__file__).with_name(wire.KEEPER_FILE)
BALLAST_BYTES = 256 * 1024


def _start_cold(start: Start, log: int) -> subprocess.Popen[bytes]:
    """Start the keeper, in its own session so that Ctrl-C does not reach it."""
    command = [sys.executable, "-I", "-S", str(KEEPER), "agent", str(os.getpid()), *start.command]
    return subprocess.Popen(
        command,
        cwd=start.cwd,
        env=dict(start.env),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


class Job(abc.ABC):
    """A running torchrun job, wherever its agents run: `LocalJob` here.

    The watcher sets `ended` when every process is gone and the records are final, and `over` once the display was told.
    `end` is what ddpkit knows about the end: {"reason": "", "notes": [...], "keeper_exitcode": int, "let_go": [hosts]}.
    """

    # Whether the job may go on without an agent that has failed.
    elastic = False

    def __init__(self, folder: Path, cold_because: str) -> None:
        self.folder = folder
        self.ended, self.over = threading.Event(), threading.Event()
        self.end: dict[str, Any] = {"reason": "", "notes": []}
        self.cold_because = cold_because
        self.started = time.monotonic()
        self._lock = threading.Lock()

    @property
    @abc.abstractmethod
    def running(self) -> bool:
        """Whether a keeper is still there, and so perhaps a process below it."""

    def exit_fds(self) -> list[int]:
        """File descriptors that become readable when an agent's processes are gone; the caller closes them."""
        return []

    @property
    def waits(self) -> str:
        """What the job waits for before any agent can start, such as a place in a queue; "" if for nothing."""
        return ""

    def let_go(self) -> None:
        """Tell the agents to end that wait for one that has failed; the watcher calls it while no rank is left.

        An agent waits for the others when its ranks are done, or to start again: for 300 s or longer. Each call tells it
        once more, and the second one has it killed: that takes some seconds less.
        """
        codes = self._exitcodes()
        waiting = [node for node, code in codes.items() if code is None]
        if waiting and any(codes.values()) and not self.elastic:
            self.end["let_go"] = sorted({*self.end.get("let_go", []), *waiting})
            self._end()

    def stop(self, reason: str) -> None:
        """Begin to end the job and return at once. `reason`: stopped, timeout or stall; the first one counts.

        A rank whose SIGTERM handler runs gets torchrun's time for that; "stopped" once more ends it at once, too.
        """
        with self._lock:
            if not self.running or (self.end["reason"] and reason != "stopped"):
                return
            self.end["reason"] = self.end["reason"] or reason
            self._end()

    def wait(self) -> None:
        """Wait until the job has ended; an interrupt stops it, and this returns once all its processes are gone."""
        while not self.over.is_set():
            try:
                self.over.wait()
            except KeyboardInterrupt:
                self.stop("stopped")

    def note(self, text: str) -> None:
        """Add `text` to the run's notes, once."""
        if text not in self.end["notes"]:
            self.end["notes"].append(text)

    def finish(self) -> None:
        """Record what ddpkit knows about the end; the watcher calls it when no process is left."""
        self.end["keeper_exitcode"] = self._exitcode()
        (self.folder / wire.BALLAST).unlink(missing_ok=True)
        try:
            wire.write_record(self.folder / wire.END, self.end)
        except OSError as error:
            self.note(f"the run folder could not be written to the end: {error.strerror}; output may be cut.")
        self.ended.set()

    @abc.abstractmethod
    def _end(self) -> None:
        """Begin to end every process."""

    @abc.abstractmethod
    def _exitcodes(self) -> dict[str, int | None]:
        """How the agent of each host ended; None for one that still runs."""

    @abc.abstractmethod
    def _exitcode(self) -> int:
        """The exit code of the first keeper that did not end with 0, else 0."""


class LocalJob(Job):
    """A job whose agents run on this machine.

    `nodes` has for each agent the name of its host ("" if there is one agent), and the variables that it alone gets.
    """

    def __init__(
        self, folder: Path, start: Start, nodes: Mapping[str, Mapping[str, str]], elastic: bool = False
    ) -> None:
        super().__init__(folder, start.cold_because)
        self.elastic = elastic
        write_rank_python(folder)
        self._keepers: dict[str, subprocess.Popen[bytes] | ForkedKeeper] = {}
        for node, settings in nodes.items():
            own = wire.node_folder(folder, node)
            own.mkdir(parents=True, exist_ok=True)
            named = {wire.ENV_NODE: node} if node else {}
            each = replace(start, env={**start.env, **named, "PET_LOG_DIR": str(own / wire.LOGS), **settings})
            with open(own / wire.AGENT_LOG, "wb") as log:
                self._keepers[node] = self._start_warm(each, log.fileno()) or _start_cold(each, log.fileno())
        self.started = time.monotonic()

    def _start_warm(self, start: Start, log: int) -> ForkedKeeper | None:
        """The agent's keeper, forked by the zygote; None, with `cold_because` set, if it declined."""
        if self.cold_because:
            return None
        try:
            return fork_agent(start, log)
        except Declined as declined:
            self.cold_because = str(declined)
            return None

    @property
    def running(self) -> bool:
        return any(keeper.poll() is None for keeper in self._keepers.values())

    def exit_fds(self) -> list[int]:
        found = []
        for keeper in self._keepers.values():
            with contextlib.suppress(AttributeError, OSError):
                found.append(keeper.exit_fd() if isinstance(keeper, ForkedKeeper) else os.pidfd_open(keeper.pid))
        return found

    def _end(self) -> None:
        for keeper in self._keepers.values():
            with contextlib.suppress(ProcessLookupError):
                keeper.send_signal(signal.SIGTERM)

    def _exitcodes(self) -> dict[str, int | None]:
        return {node: keeper.poll() for node, keeper in self._keepers.items()}

    def _exitcode(self) -> int:
        codes = [keeper.wait() for keeper in self._keepers.values()]
        return next((code for code in codes if code), 0)


def write_rank_python(folder: Path) -> None:
    """Write the shell file that PYTHON_EXEC names, which torchrun starts as a rank's python.

    Raises:
        LaunchError: no program may be started from `folder`.
    """
    shim = folder / wire.RANK_PYTHON
    python = f'exec "{sys.executable}" -I -S'
    shim.write_text(
        "#!/bin/sh\n"
        f'[ "${wire.ENV_ZYGOTE}" ] && {python} -c \'{wire.CLIENT}\' "{KEEPER.parent}" "${wire.ENV_ZYGOTE}" "$@"\n'
        f'{python} "{KEEPER}" rank "$@"\n',
        encoding="utf-8",
    )
    shim.chmod(0o755)
    (folder / wire.BALLAST).write_bytes(os.urandom(BALLAST_BYTES))
    if not os.access(shim, os.X_OK):
        raise LaunchError(
            f"launch: {folder} does not allow programs to be started from it; set {wire.ENV_HOME} to a folder that does."
        )


def handles(pid: int, number: int) -> bool:
    """Whether a process handles signal `number`; True if the system does not tell.

    A process that called exec has lost its handlers, and the signal would kill it.
    """
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
            caught = next(line for line in status if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return True
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def signal_rank(pid: int, number: int) -> bool:
    """Send signal `number` to a rank's process; False if it is gone."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
