"""Keeps one zygote per kernel, and asks it to fork a job's agent.

The zygote itself is `recorder/zygote.py`; the two talk in the messages of `forked_client.py`.
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
from dataclasses import dataclass, field
from pathlib import Path

from ddpkit.runfolder import wire

from .forked_client import Connection, Declined, ask, ending

PROGRAM = Path(__file__).parents[1] / "recorder" / "zygote.py"
# How long a launch waits for a zygote that still starts. It imports torch once, a cold job twice in a row, so waiting is
# shorter on a machine of any speed.
PATIENCE_S = 30.0
# One OpenBLAS thread keeps the process at one thread; counting GPUs by NVML leaves CUDA untouched.
RECIPE = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
ROOM_BYTES = 32 * 1024
END_WITHIN_S = 2.0
# How long every launch waits for a zygote that has imported torch: a cold start takes longer.
ANSWERS_WITHIN_S = 2.0
# After this many zygotes that ended before they served a job, no more are started.
FAILED_STARTS = 2

_lock = threading.Lock()
_current: Zygote | None = None
_failed = 0
_last_words = ""


@dataclass(frozen=True)
class Start:
    """How to start a job's agent: `command` in the folder `cwd` with `env`, warm unless `cold_because` says why not.

    `folders` are those the job imports from, `variables` those it may set before it imports torch, `base_env` is the
    environment of a new zygote, and `patience_s` how long to wait for a zygote that is still importing torch.
    """

    command: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    cold_because: str
    folders: Sequence[str] = ()
    variables: Sequence[str] = ()
    base_env: Mapping[str, str] = field(default_factory=dict)
    patience_s: float = 0.0


class Zygote:
    """The warm process of this kernel. Its folder holds its log and its socket, which only this user can open."""

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
        # Forked processes show their own command line and environment in /proc, in the room made here.
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
        """The pid of the process that has torch imported."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it runs, and this process started it rather than a parent that forked this process."""
        return self.kernel == os.getpid() and self._process.poll() is None

    def end(self) -> None:
        """End it if this process started it; jobs that it forked go on."""
        atexit.unregister(self.end)
        if self.kernel == os.getpid():
            self._process.terminate()
            self._burying.join(END_WITHIN_S)


class ForkedKeeper:
    """The keeper of a warm job's agent, with the part of `subprocess.Popen` that `Job` needs."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid = pid
        self._connection = connection
        self._lock = threading.Lock()
        self._returncode: int | None = None

    def poll(self, within_s: float = 0.001) -> int | None:
        """The exit code, -15 for a death by SIGTERM; None while it runs."""
        with self._lock:
            if self._returncode is None:
                self._connection.socket.settimeout(within_s)
                try:
                    self._returncode = os.waitstatus_to_exitcode(ending(self._connection))
                except TimeoutError:
                    pass
            return self._returncode

    def wait(self) -> int:
        """Wait for the exit code."""
        while (code := self.poll(within_s=0.2)) is None:
            pass
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the keeper has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def exit_fd(self) -> int:
        """A file descriptor that becomes readable at the end; the caller closes it."""
        return os.dup(self._connection.socket.fileno())


def begin(env: Mapping[str, str]) -> None:
    """Start the zygote in the background, if there is none and one is wanted."""
    with contextlib.suppress(Declined):
        _running(env)


def end() -> None:
    """End this kernel's zygote; the next launch starts another."""
    with _lock:
        if _current is not None:
            _retire(_current)


def fork_agent(start: Start, log: int) -> ForkedKeeper:
    """Have the zygote fork a job's agent, with its output to file descriptor `log`; returns its keeper.

    Raises:
        Declined: the job has to start cold; the text says why.
    """
    zygote = _running(start.base_env)
    try:
        return _forked(zygote, start, log)
    except Declined as declined:
        if not declined.stale:
            raise
    with _lock:
        _retire(zygote)
    return _forked(_running(start.base_env), start, log)


def _forked(zygote: Zygote, start: Start, log: int) -> ForkedKeeper:
    try:
        connection = Connection.to(zygote.path)
    except OSError:
        raise Declined("the warm process was gone", stale=True) from None
    request = {
        "what": "agent",
        "arguments": list(start.command),
        "cwd": start.cwd,
        "env": {**start.env, wire.ENV_ZYGOTE: zygote.path},
        "folders": list(start.folders),
        "variables": list(start.variables),
    }
    patience_s = max(start.patience_s, ANSWERS_WITHIN_S if zygote.served else 0.05)
    with open(os.devnull, "rb") as null:
        try:
            keeper = ask(connection, request, (null.fileno(), log, log), patience_s)
        except BaseException:
            connection.close()
            raise
    zygote.served = True
    return ForkedKeeper(keeper, connection)


def _running(env: Mapping[str, str]) -> Zygote:
    """This kernel's zygote, started now if there is none.

    Raises:
        Declined: none is wanted, or none can run here.
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
    """Forget `zygote`, which has ended or is out of date; call it with the lock held."""
    global _current, _failed, _last_words
    if zygote is not _current:
        return
    _current = None
    zygote.end()
    if zygote.kernel == os.getpid():
        _failed = 0 if zygote.served else _failed + 1
        _last_words = zygote.last_words


def _short_folder() -> Path:
    """A private folder with a short path: Linux allows 107 bytes for the path of a socket."""
    folder = tempfile.mkdtemp(prefix="ddpkit-")
    if len(os.fsencode(folder)) > 90:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="ddpkit-", dir="/tmp")
    return Path(folder)
