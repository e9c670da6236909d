"""Reads how a job ended from its run folder: the ranks of each attempt, and the notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import wire
from .ranks import Rank, read_attempts
from .stable import shortened, stable


@dataclass(frozen=True)
class Ending:
    """How the job ended. `reason`: "" (by itself), "stopped", "timeout" or "stall"; `by`: a sentence that says more of it.

    `agent_node` is the host of the agent that counts, "" if there is one agent; `lost_nodes` are hosts without a sign of life.
    """

    reason: str = ""
    agent_exitcode: int | None = 0
    agent_signal: str | None = None
    agent_error: str = ""
    agent_node: str = ""
    lost_nodes: tuple[str, ...] = ()
    timeout_s: float | None = None
    stall_s: float | None = None
    running: bool = False
    by: str = ""

    @property
    def agent_death(self) -> str:
        """`torchrun itself was killed by SIGKILL`, or `torchrun on node1 was killed by SIGKILL`."""
        agent = f"torchrun on {self.agent_node}" if self.agent_node else "torchrun itself"
        return f"{agent} was killed by {self.agent_signal}"

    @property
    def nodes_gone(self) -> str:
        """`host n2 is gone, and its agent left no record`; for several `hosts n2 and n3 are gone ...`."""
        *others, last = self.lost_nodes
        if others:
            return f"hosts {', '.join(others)} and {last} are gone, and their agents left no record"
        return f"host {last} is gone, and its agent left no record"


@dataclass(frozen=True)
class Account:
    """A job as recorded so far: the ranks of each attempt, how it ended, and the notes."""

    attempts: tuple[tuple[Rank, ...], ...]
    ending: Ending
    notes: tuple[str, ...]

    @property
    def last_attempt(self) -> tuple[Rank, ...]:
        """The ranks of the last attempt; () if none has started."""
        return self.attempts[-1] if self.attempts else ()

    @property
    def state(self) -> str:
        """What the job has come to: passed, failed, hung, timed_out or stopped."""
        if self.ending.reason:
            return {"timeout": "timed_out", "stall": "hung"}.get(self.ending.reason, "stopped")
        passed = self.ending.agent_exitcode == 0 and not self.ending.agent_signal
        return "passed" if passed and all(rank.exitcode == 0 for rank in self.last_attempt) else "failed"


def read_account(folder: Path, spec: Mapping[str, Any], end: Mapping[str, Any], torchrun_log: str) -> Account:
    """The account of the job in `folder`, started with `spec`; `end` is how ddpkit ended it."""
    attempts = read_attempts(folder)
    agent, node = _agent_that_counts(folder, end, elastic=":" in str(spec.get("asked", {}).get("nnodes", "")))
    reason = end.get("reason", "") or ("stopped" if agent.get("told") else "")
    ending = Ending(
        reason=reason,
        agent_exitcode=agent.get("exitcode", end.get("keeper_exitcode")),
        agent_signal=None if reason else agent.get("signal"),
        agent_error=end.get("error") or _last_words(torchrun_log),
        agent_node=node,
        by=end.get("by", ""),
        lost_nodes=_lost_nodes(folder, end),
        timeout_s=spec.get("timeout_s"),
        stall_s=spec.get("stall_s"),
    )
    notes = (*spec.get("notes", ()), *end.get("notes", ()), *_of_the_ranks(attempts), *_of_the_agent(agent))
    return Account(attempts, ending, notes)


def _agent_that_counts(folder: Path, end: Mapping[str, Any], elastic: bool) -> tuple[Mapping[str, Any], str]:
    """The record of the agent by which a job ended, and its host if there are several agents.

    That is one that did not end well, in an elastic job one that did. An agent counts only if nothing else does that was
    told to end because another had failed.
    """
    found = []
    for own in wire.node_folders(folder):
        record = wire.read_record(own / wire.AGENT_RECORD) or {}
        node = "" if own == folder else own.name
        failed = bool(record.get("exitcode", 1))
        found.append((node in end.get("let_go", ()), failed == elastic, node, record))
    *_, node, record = min(found, key=lambda agent: agent[:3])
    return record, node


def _lost_nodes(folder: Path, end: Mapping[str, Any]) -> tuple[str, ...]:
    """The hosts without a sign of life; at the end, those that wrote no record of their agent's end while another did."""
    nodes = [own for own in wire.node_folders(folder) if own != folder]
    silent = [own.name for own in nodes if not (own / wire.AGENT_RECORD).exists()]
    is_over = "keeper_exitcode" in end and len(silent) < len(nodes)
    return tuple(sorted({*end.get("lost", ()), *(silent if is_over else ())}))


def as_they_stood(ranks: Sequence[Rank]) -> list[Rank]:
    """The ranks of a job that was ended, as they were before that.

    A rank that failed after the first SIGTERM failed because the job ended; its look shows where it was before.
    """
    told_ns = [rank.told_ns for rank in ranks if rank.told]
    before = []
    for rank in ranks:
        failed_ns = rank.failure.at_ns if rank.failure else rank.ended_ns or 0
        ended_after = bool(told_ns) and rank.look is not None and failed_ns >= min(told_ns)
        before.append(replace(rank, failure=None, exitcode=None) if ended_after else rank)
    return before


def returned_values(ranks: Sequence[Rank]) -> dict[int, Any]:
    """What the function of the job returned, by rank. Only for a job of this process: unpickling runs code."""
    import cloudpickle

    found = {}
    for rank in ranks:
        path = rank.folder / wire.RETURNED
        if path.exists():
            found[rank.rank] = cloudpickle.loads(path.read_bytes())
    return found


def _of_the_ranks(attempts: Sequence[tuple[Rank, ...]]) -> list[str]:
    notes = []
    if len(attempts) > 1:
        notes.append(f"torchrun restarted the ranks: this was attempt {len(attempts)}, see run.attempts.")
    for rank in attempts[-1] if attempts else ():
        if rank.killed_for.startswith("it "):
            notes.append(f"rank {rank.rank} {rank.killed_for.removeprefix('it ')} and was ended by SIGKILL.")
    return notes


def _of_the_agent(agent: Mapping[str, Any]) -> list[str]:
    ours = (wire.KEEPER_FILE, wire.CLIENT)
    stubborn = [s for s in agent.get("swept", []) if not any(program in s["command"] for program in ours)]
    if stubborn and not agent.get("signal"):
        return [f"{len(stubborn)} processes had outlived the job and were ended."]
    return []


def _last_words(log: str) -> str:
    """The last line of torchrun's log that states an error."""
    others = (" ", "[", "W", "E", "frame #")
    lines = [line.strip() for line in log.splitlines() if "Error" in line and not line.startswith(others)]
    return shortened(stable(lines[-1])) if lines else ""
