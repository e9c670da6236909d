"""Finds the torchrun jobs that run on this host, whoever started them, by the environment that torchrun gives to a rank.

Nothing is changed: the processes are only read. `watcher/other_job.py` looks at what is found here.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

# torchrun's error file is in a folder of its own for each agent and attempt: jobs may share a run id and a port.
_MARKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")
_AGENTS = ("torchrun", "torch.distributed", "torch/distributed", "accelerate")


class NoSuchJob(LookupError):
    """No job was found; the message says what was asked, what was found, and what to do."""


class SeveralJobs(NoSuchJob):
    """The user has several jobs, and has to name one."""


@dataclass(frozen=True)
class RunningJob:
    """A job as its processes show it. `pids`: each rank's process, by rank.

    `ended`: the ranks of this host that have no process any more; `members`: every process with the job's environment;
    `master`: the address of its store; `uid`: whose job it is; both only if the environment may be read.
    """

    agent: int
    world_size: int
    pids: Mapping[int, int]
    ended: tuple[int, ...] = ()
    members: frozenset[int] = frozenset()
    master: str = ""
    uid: int = -1

    @property
    def elsewhere(self) -> int:
        """How many ranks are on other hosts, or belong to another agent."""
        return self.world_size - len(self.pids) - len(self.ended)

    @property
    def command(self) -> str:
        """`torchrun --nproc-per-node 2 train.py`; "" if the agent is gone."""
        with contextlib.suppress(psutil.Error):
            words = psutil.Process(self.agent).cmdline()
            script = next((at for at, word in enumerate(words) if Path(word).name in _AGENTS), 0)
            return shlex.join([Path(words[script]).name, *words[script + 1 :]]) if words else ""
        return ""


def job_of(pid: int | None) -> RunningJob:
    """The job to which a process belongs: the agent, a rank or a rank's child; without a pid, this user's only job.

    Raises:
        NoSuchJob: there is none. `SeveralJobs`: a pid is needed.
    """
    jobs = running_jobs()
    if pid is None:
        return _the_only(jobs)
    for job in jobs:
        if pid == job.agent or pid in job.members:
            return job
    try:
        psutil.Process(pid).environ()
    except psutil.NoSuchProcess:
        raise NoSuchJob(f"look: there is no process {pid} on this host.") from None
    except psutil.AccessDenied:
        return _unread(psutil.Process(pid))
    raise NoSuchJob(f"look: process {pid} is neither a torchrun agent nor one of its ranks. {_list(jobs)}")


def running_jobs() -> list[RunningJob]:
    """Every torchrun job on this host whose processes this user may read, the oldest first."""
    found: dict[tuple[str, str], list[tuple[psutil.Process, dict[str, str]]]] = {}
    processes = psutil.process_iter(["create_time"])
    for process in sorted(processes, key=lambda one: (one.info["create_time"] or 0, one.pid)):
        with contextlib.suppress(psutil.Error):
            env = process.environ()
            if all(name in env for name in _MARKS):
                attempt = Path(env["TORCHELASTIC_ERROR_FILE"]).parent.parent
                found.setdefault((env["TORCHELASTIC_RUN_ID"], str(attempt)), []).append((process, env))
    jobs = []
    for members in found.values():
        # A job may end while it is read.
        with contextlib.suppress(psutil.Error):
            jobs.append(_job(members))
    return jobs


def _job(members: Sequence[tuple[psutil.Process, Mapping[str, str]]]) -> RunningJob:
    """The job of these processes, the oldest first. A rank's oldest python is the rank; its workers came later."""
    first, env = members[0]
    pids, wrappers = dict[int, int](), dict[int, int]()
    for process, own in members:
        (wrappers if _wraps_a_rank(process) else pids).setdefault(int(own["RANK"]), process.pid)
    pids = wrappers | pids
    lowest = int(env["RANK"]) - int(env["LOCAL_RANK"])
    here = range(lowest, lowest + int(env["LOCAL_WORLD_SIZE"]))
    return RunningJob(
        agent=first.ppid(),
        world_size=int(env["WORLD_SIZE"]),
        pids=dict(sorted(pids.items())),
        ended=tuple(rank for rank in here if rank not in pids),
        members=frozenset(process.pid for process, _ in members),
        uid=first.uids().real,
        master=f"{env.get('MASTER_ADDR', '')}:{env.get('MASTER_PORT', '')}",
    )


def _wraps_a_rank(process: psutil.Process) -> bool:
    """Whether a process has only started the rank: a shell, or ddpkit's keeper, a python that imports nothing."""
    with contextlib.suppress(psutil.Error):
        return not process.name().startswith("python") or "-S" in process.cmdline()[1:3]
    return True


def _the_only(jobs: Sequence[RunningJob]) -> RunningJob:
    own = [job for job in jobs if job.uid == os.getuid()]
    if len(own) > 1:
        raise SeveralJobs(
            f"look: {len(own)} torchrun jobs of yours run on this host; name one by its PID. {_list(own)}"
        )
    if not own:
        advice = "For another user's job give a PID: ddpkit look PID."
        raise NoSuchJob(f"look: no torchrun job of yours runs on this host. {advice}")
    return own[0]


def _list(jobs: Sequence[RunningJob]) -> str:
    """The jobs, one a line."""
    if not jobs:
        return "No torchrun job that you may read runs on this host."
    return "\n".join(["Running now:", *(f"  {job.agent}  {job.command} ({len(job.pids)} ranks)" for job in jobs)])


def _unread(process: psutil.Process) -> RunningJob:
    """The job of a process whose environment may not be read: torchrun starts its ranks in their order."""
    for agent in (process, *process.parents()):
        with contextlib.suppress(psutil.Error):
            if any(name in word for word in agent.cmdline() for name in _AGENTS):
                children = sorted(agent.children(), key=lambda child: (child.create_time(), child.pid))
                pids = {number: child.pid for number, child in enumerate(children)}
                return RunningJob(agent.pid, len(pids), pids)
    raise NoSuchJob(
        f"look: process {process.pid} belongs to {process.username()}, its environment may not be read, and no torchrun "
        f"is above it. Run this as {process.username()} or as root."
    )
