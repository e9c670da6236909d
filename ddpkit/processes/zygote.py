"""Warm start, seen from the kernel: keeps one zygote, starts it anew when it has gone, and asks it for a job's agent.

The process itself is `recorder/zygote.py`; what is said between the two is in `forked_client.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpkit.runfolder import wire

from .forked_client import Connection, Declined, ask, ending

PROGRAM = Path(__file__).parents[1] / "recorder" / "zygote.py"
# A start that has not ended after this long is not waited for any longer. It imports torch once, a cold job twice in
# turn, so that waiting is the shorter way on a machine of any speed.
PATIENCE_S = 30.0
# With one thread of OpenBLAS there is one thread in all; asking NVML rather than CUDA for GPUs leaves CUDA untouched.
RECIPE = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
ROOM_BYTES = 32 * 1024
END_WITHIN_S = 2.0
# How long one that has torch imported is waited for even by a launch that does not wait: a cold start takes longer.
ANSWERS_WITHIN_S = 2.0
# After so many zygotes that ended before they served anybody, no more are started.
FAILED_STARTS = 2

_lock = threading.Lock()
_current: Zygote | None = None
_failed = 0
_last_words = ""


class Zygote:
    """The warm process of this kernel. Its folder holds its socket, which only this user can open, and its log."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.kernel = os.getpid()
        self.folder = _short_folder()
        self.path = str(self.folder / wire.ZYGOTE_SOCKET)
        self.served = False
        self.last_words = ""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            os.chmod(self.path, 0o600)
            listener.listen(256)
            self._process = self._start(listener.fileno(), env)
        self._burying = threading.Thread(target=self._bury, name="ddpkit waits for its zygote", daemon=True)
        self._burying.start()
        atexit.register(self.end)

    def _start(self, listening_fd: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-u", str(PROGRAM), str(listening_fd), str(self.kernel), str(self.folder)]
        # Room for the command lines of what it forks, and for their environments.
        command.append(" " * 4096)
        warm = {k: v for k, v in env.items() if k != "OMP_NUM_THREADS"} | RECIPE | {wire.ENV_ROOM: "x" * ROOM_BYTES}
        with open(self.folder / wire.ZYGOTE_LOG, "wb") as log:
            return subprocess.Popen(
                command,
                env=warm,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[listening_fd],
                start_new_session=True,
            )

    def _bury(self) -> None:
        code = self._process.wait()
        with contextlib.suppress(OSError, IndexError):
            said = (self.folder / wire.ZYGOTE_LOG).read_text(errors="replace")
            self.last_words = said.strip().splitlines()[-1] if said.strip() else f"exit code {code}"
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        """Of the process that has torch imported."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it is there, for this process and not for one that forked this one."""
        return self.kernel == os.getpid() and self._process.poll() is None

    def end(self) -> None:
        """End it, if it is this process's own; jobs that it has forked go on."""
        atexit.unregister(self.end)
        if self.kernel == os.getpid():
            self._process.terminate()
            self._burying.join(END_WITHIN_S)


class ForkedKeeper:
    """The keeper over the agent of a warm job, with as much of `subprocess.Popen` as `Job` needs."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid = pid
        self._connection = connection
        self._lock = threading.Lock()
        self._returncode: int | None = None

    def poll(self, within_s: float = 0.001) -> int | None:
        """The exit code, -15 for a death by SIGTERM; None while it is there."""
        with self._lock:
            if self._returncode is None:
                self._connection.socket.settimeout(within_s)
                try:
                    self._returncode = os.waitstatus_to_exitcode(ending(self._connection))
                except TimeoutError:
                    pass
            return self._returncode

    def wait(self) -> int:
        """Return the exit code when there is one."""
        while (code := self.poll(within_s=0.2)) is None:
            pass
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def exit_fd(self) -> int:
        """A file descriptor of the caller's own that becomes readable at the end."""
        return os.dup(self._connection.socket.fileno())


@dataclass(frozen=True)
class Agent:
    """A torchrun agent to be forked: its command and environment, the folders its job imports from, the variables that
    its ranks may set, and the file descriptor of its output."""

    command: Sequence[str]
    env: Mapping[str, str]
    folders: Sequence[str]
    variables: Sequence[str]
    log: int


def begin(env: Mapping[str, str]) -> None:
    """Start the zygote in the background unless there is one, or none is wanted; returns at once."""
    with contextlib.suppress(Declined):
        _running(env)


def end() -> None:
    """End this kernel's zygote, if there is one; the next launch starts another."""
    with _lock:
        if _current is not None:
            _retire(_current)


def fork_agent(agent: Agent, base_env: Mapping[str, str], patience_s: float) -> ForkedKeeper:
    """Have `agent` forked; its keeper. `base_env` is the environment that a new zygote would start with.

    Waits up to `patience_s` for a zygote that is still importing torch.

    Raises:
        Declined: the job has to start cold; the text says why.
    """
    zygote = _running(base_env)
    try:
        return _forked(zygote, agent, patience_s)
    except Declined as declined:
        if not declined.stale:
            raise
    with _lock:
        _retire(zygote)
    return _forked(_running(base_env), agent, patience_s)


def _forked(zygote: Zygote, agent: Agent, patience_s: float) -> ForkedKeeper:
    try:
        connection = Connection.to(zygote.path)
    except OSError:
        raise Declined("the warm process was gone", stale=True) from None
    request = {
        "what": "agent",
        "arguments": list(agent.command),
        "env": {**agent.env, wire.ENV_ZYGOTE: zygote.path},
        "folders": list(agent.folders),
        "variables": list(agent.variables),
    }
    with open(os.devnull, "rb") as null:
        try:
            answers_within_s = ANSWERS_WITHIN_S if zygote.served else 0.05
            keeper = ask(connection, request, (null.fileno(), agent.log, agent.log), max(patience_s, answers_within_s))
        except BaseException:
            connection.close()
            raise
    zygote.served = True
    return ForkedKeeper(keeper, connection)


def _running(env: Mapping[str, str]) -> Zygote:
    """This kernel's zygote, started now if need be.

    Raises:
        Declined: none is wanted, or none can be had here.
    """
    global _current
    if os.environ.get(wire.ENV_WARM) == "0":
        raise Declined(f"{wire.ENV_WARM}=0")
    if not sys.platform.startswith("linux"):
        raise Declined(f"fork is not safe on {sys.platform}")
    with _lock:
        if _current is not None and not _current.alive():
            _retire(_current)
        if _failed >= FAILED_STARTS:
            raise Declined(f"the warm process cannot be started ({_last_words})")
        if _current is None:
            try:
                _current = Zygote(env)
            except OSError as error:
                raise Declined(f"the warm process cannot be started ({error})") from None
        return _current


def _retire(zygote: Zygote) -> None:
    """Have no more to do with `zygote`, which has ended or is out of date; called with the lock held."""
    global _current, _failed, _last_words
    if zygote is not _current:
        return
    _current = None
    zygote.end()
    if zygote.kernel == os.getpid():
        _failed = 0 if zygote.served else _failed + 1
        _last_words = zygote.last_words


def _short_folder() -> Path:
    """A private folder whose sockets' paths stay below the 107 bytes that Linux allows."""
    folder = tempfile.mkdtemp(prefix="ddpkit-")
    if len(os.fsencode(folder)) > 90:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="ddpkit-", dir="/tmp")
    return Path(folder)
