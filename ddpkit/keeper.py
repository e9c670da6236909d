"""Stands over one process of a job: starts it, passes signals on, writes down how it ended, and lets nothing outlive its owner.

The same program is used twice. Over the torchrun agent its owner is the kernel (`process.py` starts it);
over each rank its owner is the agent (torchrun starts it through PYTHON_EXEC). So the chain kernel - keeper -
agent - keeper - rank breaks nowhere: whichever link is killed, those below it end and those above it know.
It runs as `python -I -S keeper.py`, in some 15 ms, and is single-threaded, so that a parent-death signal may be trusted.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from ddpkit import wire

TICK_S = 0.2
RANK_GRACE_S = 2.0
AGENT_GRACE_S = 4.0
SWEEP_GRACE_S = 2.5
LINGER_S = 1.0
PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
    signal.SIGQUIT,
)
FATAL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PR_SET_PDEATHSIG = 1


class Keeper:
    """Keeps one child. `run` returns when the child has been reaped and its record written."""

    def __init__(self, command: Sequence[str], owner: int, record: Path, grace_s: float) -> None:
        self.command = list(command)
        self.owner = owner
        self.record = record
        self.grace_s = grace_s
        self.told: str | None = None
        self.told_ns = 0
        self.killed_for = ""
        self.status: int | None = None
        self.peak_rss_mib = 0.0

    def run(self, after: Callable[[], None]) -> int:
        """Start the child, wait for it, write the record, call `after`; returns the child's wait status."""
        signals = {*PASSED_ON, signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        self.pid = self._start()
        while not self._reaped():
            caught = signal.sigtimedwait(signals, TICK_S)
            if caught and caught.si_signo != signal.SIGCHLD:
                self._pass_on(signal.Signals(caught.si_signo))
            self._mind_the_owner()
            self._lose_patience()
        self._write_record()
        after()
        return self.status or 0

    def _start(self) -> int:
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        keeper = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            # A group of its own: whoever signals the keeper's group reaches the child once, by way of the keeper.
            os.setpgid(0, 0)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(1)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            os.execv(self.command[0], self.command)
        except BaseException as error:
            print(f"ddpkit: cannot start {self.command[0]}: {error}", file=sys.stderr, flush=True)
            os._exit(127)

    def _reaped(self) -> bool:
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if pid == 0:
            return False
        self.status = status
        self.ended_ns = time.time_ns()
        self.peak_rss_mib = round(usage.ru_maxrss / 1024, 1)
        return True

    def _pass_on(self, which: signal.Signals) -> None:
        if which in FATAL and self.told is None:
            self.told, self.told_ns = which.name, time.time_ns()
        self._signal_group(which)

    def _signal_group(self, which: signal.Signals) -> None:
        try:
            os.killpg(self.pid, which)
        except (ProcessLookupError, PermissionError):
            # The group is not made yet in the first instant after the fork.
            try:
                os.kill(self.pid, which)
            except ProcessLookupError:
                pass

    def _mind_the_owner(self) -> None:
        if self.told is None and os.getppid() != self.owner:
            self.killed_for = "its owner is gone"
            self._pass_on(signal.SIGTERM)

    def _lose_patience(self) -> None:
        if self.told and time.time_ns() - self.told_ns > self.grace_s * 1e9:
            self.killed_for = f"it ignored {self.told} for {self.grace_s:g} s"
            self._signal_group(signal.SIGKILL)

    def _write_record(self) -> None:
        status = self.status or 0
        died_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        record = {
            "pid": self.pid,
            "exitcode": -died_by if died_by else os.WEXITSTATUS(status),
            "signal": signal_name(died_by) if died_by else None,
            "at_ns": self.ended_ns,
            "told": self.told,
            "told_ns": self.told_ns,
            "killed_for": self.killed_for,
            "peak_rss_mib": self.peak_rss_mib,
        }
        try:
            wire.write_record(self.record, record)
        except OSError as error:
            print(f"ddpkit: how this process ended could not be written down: {error}", file=sys.stderr, flush=True)


def signal_name(number: int) -> str:
    """The name of signal `number`, such as "SIGKILL"; "signal 35" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def keep_rank(arguments: Sequence[str]) -> int:
    """What torchrun starts in place of a rank's interpreter; `arguments` are those it meant for python."""
    folder = wire.own_rank_folder()
    if folder is None:
        raise SystemExit("ddpkit: the rank keeper was started outside a ddpkit job; use torchrun, or ddpkit.launch().")
    folder.mkdir(parents=True, exist_ok=True)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    bootstrap = str(Path(__file__).parent / "rank" / "bootstrap.py")
    command = [sys.executable, "-u", bootstrap, *(arguments[1:] if arguments[:1] == ["-u"] else arguments)]
    keeper = Keeper(command, os.getppid(), folder / wire.EXIT, RANK_GRACE_S)
    return keeper.run(after=lambda: _let_the_others_speak(keeper, folder))


def _let_the_others_speak(keeper: Keeper, folder: Path) -> None:
    """Hold back a failed rank's exit for up to a second, until every other rank has ended too.

    torchrun ends all ranks as soon as it sees one gone. The rank itself is gone by now, its sockets with it, so its
    peers meet the consequence by themselves; and where every rank fails alike, each gets to say so.
    """
    if keeper.told or not keeper.status:
        return
    world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    until = time.monotonic() + LINGER_S
    while time.monotonic() < until and os.getppid() == keeper.owner:
        if sum(1 for _ in folder.parent.glob(f"*/{wire.EXIT}")) >= world_size:
            return
        if signal.sigtimedwait(PASSED_ON, 0.02):
            return


def keep_agent(owner: int, arguments: Sequence[str]) -> int:
    """What `process.py` starts: the torchrun command in `arguments`, whose job ends with the process `owner`."""
    folder = Path(os.environ[wire.ENV_RUN])
    keeper = Keeper(arguments, owner, folder / wire.AGENT_RECORD, AGENT_GRACE_S)
    return keeper.run(after=lambda: sweep(folder))


def sweep(folder: Path) -> None:
    """End every process of the job in `folder` that outlived its agent: SIGTERM, and SIGKILL for those that stay."""
    found = _marked(folder)
    if not found:
        return
    swept = {pid: {"pid": pid, "command": command, "signal": "SIGTERM"} for pid, command in found.items()}
    _signal_all(found, signal.SIGTERM)
    until = time.monotonic() + SWEEP_GRACE_S
    while (found := _marked(folder)) and time.monotonic() < until:
        time.sleep(0.02)
    while found:
        swept.update({pid: {"pid": pid, "command": command, "signal": "SIGKILL"} for pid, command in found.items()})
        _signal_all(found, signal.SIGKILL)
        time.sleep(0.02)
        found = _marked(folder)
    record = wire.read_record(folder / wire.AGENT_RECORD) or {}
    wire.write_record(folder / wire.AGENT_RECORD, {**record, "swept": list(swept.values())})


def _signal_all(pids: dict[int, str], which: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, which)
        except (ProcessLookupError, PermissionError):
            pass


def _marked(folder: Path) -> dict[int, str]:
    """Living processes, other than this one, whose environment carries this job's run folder: pid to command."""
    mark = f"{wire.ENV_RUN}={folder}".encode()
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as environ:
                if mark not in environ.read().split(b"\0"):
                    continue
            with open(f"/proc/{entry}/cmdline", "rb") as cmdline:
                found[int(entry)] = cmdline.read().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
    return found


def _end_like(status: int) -> None:
    """End this process as the child ended, killed by the same signal or with the same exit code."""
    sys.stdout.flush()
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = os.WTERMSIG(status)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    time.sleep(1)
    os._exit(128 + number)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        _end_like(keep_rank(sys.argv[2:]))
    else:
        _end_like(keep_agent(int(sys.argv[2]), sys.argv[3:]))
