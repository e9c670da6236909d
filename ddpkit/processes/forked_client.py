"""Asks the zygote for a rank, and is the process that torchrun sees for it.

torchrun starts it through PYTHON_EXEC. The zygote (`recorder/zygote.py`) forks the rank under a keeper; this process
passes signals on to that keeper and ends as the rank ended. `zygote.py` asks for the agent in the same way. If no zygote
answers, this process becomes the cold keeper. Every rank of every job waits for it, so it imports as little as
possible, and is itself imported by name, so that it is compiled once.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import marshal
import os
import sys
import time
from _socket import AF_UNIX, SCM_RIGHTS, SO_PEERCRED, SOCK_STREAM, SOL_SOCKET
from _socket import socket as Socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

READY = b"\x01"
LENGTH_BYTES = INT_BYTES = 4
PATIENCE_S = 5.0
TICK_S = 0.2
FATAL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (*FATAL, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


class Declined(Exception):
    """No process was forked; the text says why. `stale`: the zygote is out of date, a new one would fork it."""

    def __init__(self, why: str, stale: bool = False) -> None:
        super().__init__(why)
        self.stale = stale


class Connection:
    """A connection to the zygote, then to the keeper that it forked; each message is one marshalled value.

    marshal is safe here: the zygote runs the same Python and serves only its own user.
    """

    def __init__(self, socket: Socket) -> None:
        self.socket = socket
        # What counts if the keeper is killed before it can send another status.
        self.status: int = signal.SIGKILL

    @classmethod
    def to(cls, path: str) -> Connection:
        """Connect to the zygote that listens at `path`.

        Raises:
            OSError: nobody listens there.
        """
        socket = Socket(AF_UNIX, SOCK_STREAM)
        socket.connect(path)
        return cls(socket)

    def send(self, message: Any, fds: Iterable[int] = ()) -> None:
        """Send one message; the receiver gets its own copies of `fds`."""
        data = marshal.dumps(message)
        data = len(data).to_bytes(LENGTH_BYTES, "big") + data
        rights = (
            [(SOL_SOCKET, SCM_RIGHTS, b"".join(fd.to_bytes(INT_BYTES, sys.byteorder) for fd in fds))] if fds else []
        )
        sent = self.socket.sendmsg([data], rights)
        while sent < len(data):
            sent += self.socket.send(data[sent:])

    def receive(self, most_fds: int = 0) -> tuple[Any, list[int]]:
        """The next message and the file descriptors that came with it.

        Raises:
            EOFError: the other side is gone.
            TimeoutError: nothing came within the socket's time limit.
        """
        fds: list[int] = []
        head, ancillary, *_ = self.socket.recvmsg(LENGTH_BYTES, 16 + 16 * most_fds)
        for _level, kind, data in ancillary:
            if kind == SCM_RIGHTS:
                fds += _integers(data)
        head += self._exactly(LENGTH_BYTES - len(head)) if head else b""
        if not head:
            raise EOFError
        return marshal.loads(self._exactly(int.from_bytes(head, "big"))), fds

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self.socket.recv(min(size - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def peer(self) -> tuple[int, int]:
        """(pid, uid) of the process at the other end, from the kernel."""
        pid, uid, _gid = _integers(self.socket.getsockopt(SOL_SOCKET, SO_PEERCRED, 3 * INT_BYTES))
        return pid, uid

    def close(self) -> None:
        """Close this side."""
        self.socket.close()


def _integers(data: bytes) -> list[int]:
    """The C integers in `data`."""
    whole = range(0, len(data) - INT_BYTES + 1, INT_BYTES)
    return [int.from_bytes(data[at : at + INT_BYTES], sys.byteorder) for at in whole]


def ask(connection: Connection, request: dict[str, Any], fds: Iterable[int], patience_s: float) -> int:
    """Have the zygote fork a process for `request`; returns its keeper's pid.

    Raises:
        Declined: it did not; the text says why.
    """
    try:
        connection.socket.settimeout(patience_s)
        if connection._exactly(1) != READY:
            raise Declined("the warm process does not speak this language", stale=True)
        connection.send(request, fds)
        connection.socket.settimeout(PATIENCE_S)
        answer, _ = connection.receive()
    except TimeoutError:
        raise Declined("the warm process was not ready yet") from None
    except (OSError, EOFError):
        raise Declined("the warm process was gone", stale=True) from None
    if isinstance(answer, int):
        return answer
    raise Declined(*answer)


def ending(connection: Connection) -> int:
    """The wait status that the keeper sent; SIGKILL's if it was killed before it could.

    Raises:
        TimeoutError: it still runs.
    """
    try:
        while True:
            connection.status, _ = connection.receive()
    except (EOFError, ConnectionError):
        return connection.status


def end_like(status: int) -> None:
    """End this process as another ended, by its wait status: same signal or same exit code."""
    sys.stdout.flush()
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = os.WTERMSIG(status)
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    time.sleep(1)
    os._exit(128 + number)


def passing_on(pid: int) -> Callable[[int, object], None]:
    """A signal handler that sends the signal on to `pid`."""

    def handler(number: int, _frame: object) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass

    return handler


def _wait_for_rank(path: str, arguments: list[str]) -> int:
    """Have the zygote fork a rank for `arguments`, and wait for its end; returns its wait status."""
    agent = os.getppid()
    connection = Connection.to(path)
    request = {"what": "rank", "arguments": arguments, "env": dict(os.environ)}
    keeper = ask(connection, request, (0, 1, 2), PATIENCE_S)
    for number in PASSED_ON:
        signal.signal(number, passing_on(keeper))
    connection.socket.settimeout(TICK_S)
    while True:
        try:
            return ending(connection)
        except TimeoutError:
            if os.getppid() != agent:
                # The keeper ends the rank once this process is gone.
                return signal.SIGKILL


def stand_in(path: str, *arguments: str) -> None:
    """Run as the process that torchrun takes for the rank; never returns."""
    try:
        status = _wait_for_rank(path, list(arguments))
    except (OSError, Declined):
        keeper = os.path.join(os.path.dirname(os.path.abspath(__file__)), "keeper.py")
        os.execv(sys.executable, [sys.executable, "-I", "-S", keeper, "rank", *arguments])
    end_like(status)
