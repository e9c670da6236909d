"""A few words for the header of a rank's lane: how it ended, and whether that was a consequence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ddpkit.runfolder.account import Ending
from ddpkit.runfolder.failures import FAILED_IN_CHECKPOINT, LEAVES
from ddpkit.runfolder.ranks import Rank
from ddpkit.verdict.ends import End, end_by
from ddpkit.verdict.finding import Verdict

MET: dict[str, str] = {
    "peer_lost": "lost its peer",
    "gave_up": "gave up waiting",
    "reported": "was told that a rank had failed",
}
_HAD_ENDED = re.compile(r"Detected at least one rank that exhausted inputs")
_ENDED_BY = {"stopped": "stopped", "timeout": "ended at the timeout", "stall": "ended at the stall"}


def with_words(ranks: Sequence[Rank], verdict: Verdict, ending: Ending) -> tuple[Rank, ...]:
    """The ranks of a job that was judged, each with its role and its words."""
    found = []
    for rank in ranks:
        role = verdict.roles.get(rank.rank, "unknown")
        found.append(replace(rank, words=lane_words(rank, verdict, ending), role=role))
    return tuple(found)


def lane_words(rank: Rank, verdict: Verdict, ending: Ending) -> str:
    """The words for one rank of a job that was judged."""
    end, at_fault = verdict.ends.get(rank.rank), verdict.roles.get(rank.rank) == "culprit"
    if end == "passed":
        return "left early, exit code 0" if at_fault else "passed"
    if end in MET:
        met = _met(rank, end, verdict.kind)
        return f"{met}: a consequence" if not at_fault else "came too late" if verdict.kind == "straggler" else met
    if end == "parted":
        return "met another model" if verdict.kind == "shapes_differ" else "met another collective"
    return _words_of_ended(rank, ending) if end == "was_ended" else rank.plain_words


def _met(rank: Rank, end: End, kind: str) -> str:
    message = rank.failure.message if rank.failure else ""
    if _HAD_ENDED.search(message):
        return "was told that a rank had ended"
    if FAILED_IN_CHECKPOINT.search(message):
        return "was told that a rank had failed"
    return "met another rank's nan" if end == "reported" and kind == "not_finite" else MET[end]


def _words_of_ended(rank: Rank, ending: Ending) -> str:
    if rank.killed_for.startswith("it "):
        return f"{rank.killed_for.removeprefix('it ')}, then ended by SIGKILL"
    by = _ENDED_BY.get(ending.reason) or (
        "ended after torchrun's death" if ending.agent_signal else "ended by torchrun"
    )
    failure = rank.failure
    if failure and failure.type not in (rank.signal, *LEAVES) and end_by(failure, rank) == "own":
        return f"{by}, and raised {failure.type} then"
    return by
