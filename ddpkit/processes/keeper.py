"""Starts one process, passes signals on, records its end, and ends it with its owner.

A job has the chain kernel - keeper - agent - keeper - rank. The owner is the process above a keeper: the kernel, whose
`agent.py` starts the first one, or the agent, which starts the second through PYTHON_EXEC. If any link is killed, those
below it end. A keeper runs as `python -I -S keeper.py`, or forked from the zygote (`recorder/zygote.py`). It has a single
thread, because a parent-death signal is sent when the thread that forked ends.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from ddpkit.processes import grace
from ddpkit.processes.forked_client import FATAL, PASSED_ON, end_like
from ddpkit.processes.oom import OomWatch
from ddpkit.processes.sweep import sweep
from ddpkit.runfolder import wire

TICK_S = 0.2
# Slurm sends SIGTERM to a rank and to its keeper at once; the rank may have died of it before the keeper hears it.
HEARS_WITHIN_S = 0.2
LINGER_S = 1.0
LOOKED_AT_WITHIN_S = 3.0
ALIKE_WITHIN_S = 6.0
PR_SET_PDEATHSIG = 1
# From when a child was told to end: the seconds after which it is killed, and what it then did with the signal.
Grace = Callable[[int], tuple[float, str]]


class Owner:
    """The process that a child must not outlive; a later process of the same pid is not taken for it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._born = born(pid)

    def gone(self) -> bool:
        """Whether it has ended, reaped or not."""
        return self._born is None or born(self.pid) != self._born


def born(pid: int) -> bytes | None:
    """When process `pid` started, in clock ticks since boot; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            state, *rest = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if state in (b"Z", b"X") else rest[18]


class Forked(BaseException):
    """Raised in a forked process, so that `become` is called outside of the parent's frames."""

    def __init__(self, become: Callable[[], NoReturn]) -> None:
        super().__init__()
        self.become = become


class Keeper:
    """Keeps one child process, which runs `become` and never returns from it.

    A child that is told to end is killed when its grace has passed; if it is `hasty`, also when it is told once more.
    """

    def __init__(
        self, become: Callable[[], None], owner: Owner, record: Path, grace: Grace, hasty: bool = False
    ) -> None:
        self.become = become
        self.owner = owner
        self.record = record
        self.grace = grace
        self.hasty = hasty
        self.told: str | None = None
        self.told_ns = 0
        self.told_again = False
        self.killed_for = ""
        self.status: int | None = None
        self.peak_rss_mib = 0.0

    def run(self, after: Callable[[], None]) -> int:
        """Start the child, wait for it, write its record, call `after`; returns the wait status."""
        signals = {*PASSED_ON, signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        self.pid = self._start()
        self._memory = OomWatch(self.pid)
        while not self._reaped():
            self._memory.follow()
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
            # Its own group: a signal to the keeper's group then reaches the child once, through the keeper.
            os.setpgid(0, 0)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(1)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            self.become()
        except Forked:
            raise
        except BaseException as error:
            print(f"ddpkit: this process could not be started: {error}", file=sys.stderr, flush=True)
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
        if which not in FATAL or self.told is None:
            if which in FATAL:
                self.told, self.told_ns = which.name, time.time_ns()
            self._signal_group(which)
        elif self.hasty:
            self.told_again = True
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, which: signal.Signals) -> None:
        try:
            os.killpg(self.pid, which)
        except (ProcessLookupError, PermissionError):
            # Just after the fork the group may not exist yet.
            try:
                os.kill(self.pid, which)
            except ProcessLookupError:
                pass

    def _mind_the_owner(self) -> None:
        if self.told is None and self.owner.gone():
            self.killed_for = "its owner is gone"
            self._pass_on(signal.SIGTERM)

    def _lose_patience(self) -> None:
        if self.told:
            grace_s, did = self.grace(self.told_ns)
            if time.time_ns() - self.told_ns > grace_s * 1e9:
                self.killed_for = f"it {did} {self.told} for {grace_s:g} s"
                self._signal_group(signal.SIGKILL)

    def _write_record(self) -> None:
        status = self.status or 0
        died_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        if died_by and died_by in FATAL and not self.told and signal.sigtimedwait({died_by}, HEARS_WITHIN_S):
            self.told, self.told_ns = signal.Signals(died_by).name, self.ended_ns
        record = {
            "pid": self.pid,
            "exitcode": -died_by if died_by else os.WEXITSTATUS(status),
            "signal": signal_name(died_by) if died_by else None,
            "at_ns": self.ended_ns,
            "told": self.told,
            "told_ns": self.told_ns,
            "killed_for": self.killed_for,
            "peak_rss_mib": self.peak_rss_mib,
            "oom": self._memory.word() if died_by == signal.SIGKILL and not self.told else "",
        }
        try:
            wire.write_record(self.record, record)
        except OSError as error:
            print(f"ddpkit: how this process ended could not be written down: {error}", file=sys.stderr, flush=True)


def signal_name(number: int) -> str:
    """The name of a signal: "SIGKILL", "SIGRTMIN+1" as `kill -l` writes it, or "signal 33" if it has none."""
    if number > signal.SIGRTMIN:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def keep_rank(become: Callable[[], None], owner: int) -> int:
    """Keep a rank, which `become` starts, while process `owner` lives; returns its wait status."""
    folder = wire.own_rank_folder()
    if folder is None:
        raise SystemExit("ddpkit: the rank keeper was started outside a ddpkit job; use torchrun, or ddpkit.launch().")
    folder.mkdir(parents=True, exist_ok=True)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    keeper = Keeper(become, Owner(owner), folder / wire.EXIT, functools.partial(grace.of_rank, folder))
    return keeper.run(after=lambda: _let_the_others_speak(keeper, folder))


def rank_command(arguments: Sequence[str]) -> list[str]:
    """The command of a cold rank; `arguments` are those that torchrun passes to python."""
    bootstrap = str(Path(__file__).parents[1] / "recorder" / "bootstrap.py")
    return [sys.executable, "-u", bootstrap, *(arguments[1:] if arguments[:1] == ["-u"] else arguments)]


def _let_the_others_speak(keeper: Keeper, folder: Path) -> None:
    """Hold back a failed rank's exit: torchrun ends all ranks when it sees one gone.

    It is held back for a second, until every other rank has ended or the watcher has looked at those that live; for
    longer while one of these is at the line that failed. The rank and its sockets are gone by then. So its peers meet
    their own errors, each rank of a common failure can write it down, and the watcher sees where the others are.
    """
    if keeper.told or not keeper.status:
        return
    world_size, began = int(os.environ.get("WORLD_SIZE", "1")), time.monotonic()
    failed_ns = wire.written_ns(folder / wire.FAILURE) or keeper.ended_ns
    while not keeper.owner.gone():
        ended, failed = (_that_have(folder.parent, name) for name in (wire.EXIT, wire.FAILURE))
        # A look from a standstill before the failure does not count: it may be withdrawn.
        looked_at = _that_have(folder.parent, wire.LOOK, since_ns=failed_ns)
        waited_s = time.monotonic() - began
        on_their_way_out = failed - ended
        everybody_seen = len(ended | looked_at) >= world_size and not on_their_way_out and waited_s > LINGER_S
        long_enough = everybody_seen or waited_s > LOOKED_AT_WITHIN_S
        may_follow = long_enough and any(_is_where_it_failed(rank, folder) for rank in looked_at - ended)
        if len(ended) >= world_size or (long_enough and not may_follow) or waited_s > ALIKE_WITHIN_S:
            return
        if signal.sigtimedwait(PASSED_ON, 0.02):
            return


def _that_have(ranks: Path, record: str, since_ns: int = 0) -> set[Path]:
    """The folders of the ranks that have written `record` at or after `since_ns`."""
    return {path.parent for path in ranks.glob(f"*/{record}") if wire.written_ns(path) >= since_ns}


def _is_where_it_failed(rank: Path, failed: Path) -> bool:
    """Whether the rank of folder `rank` is at the line where `failed` failed."""
    where = (wire.read_record(failed / wire.FAILURE) or {}).get("where")
    if not where:
        return False
    try:
        return f'File "{where["file"]}", line {where["line"]} in ' in (rank / wire.STACK).read_text(errors="replace")
    except OSError:
        return False


def keep_agent(become: Callable[[], None], owner: int) -> int:
    """Keep the agent, which `become` starts, while process `owner` lives; returns its wait status."""
    folder = Path(os.environ[wire.ENV_RUN])

    def become_known() -> None:
        os.environ[wire.ENV_AGENT] = str(os.getpid())
        become()

    of_agent = functools.partial(grace.of_agent, folder)
    record = wire.node_folder(folder, os.environ.get(wire.ENV_NODE, "")) / wire.AGENT_RECORD
    keeper = Keeper(become_known, Owner(owner), record, of_agent, hasty=True)
    return keeper.run(after=lambda: sweep(folder, at_once=keeper.told_again))


def executing(command: Sequence[str]) -> Callable[[], None]:
    """A function that turns a forked process into `command`."""

    def become() -> None:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execv(command[0], list(command))

    return become


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        end_like(keep_rank(executing(rank_command(sys.argv[2:])), os.getppid()))
    else:
        end_like(keep_agent(executing(sys.argv[3:]), int(sys.argv[2])))
