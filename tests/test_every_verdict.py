"""Whatever ranks left behind, in whatever combination, a verdict comes: one sentence, and ranks that the job had."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from jobs import jobs

from ddpkit.runfolder.account import Ending
from ddpkit.runfolder.ranks import Rank, read_attempts
from ddpkit.verdict.judge import judge

# One process unpacks the recorded runs.
pytestmark = pytest.mark.xdist_group("recorded")

ENDINGS = [Ending(agent_exitcode=1), Ending("stall", 1, stall_s=5.0), Ending("timeout", 1, timeout_s=9.0)]
NPROC = 3
MIXES = 2_000


def recorded_ranks(recorded: Path) -> list[list[Rank]]:
    """For each rank, as it was recorded in each job of NPROC ranks."""
    found: list[list[Rank]] = [[] for _ in range(NPROC)]
    for job in jobs():
        if job.nproc == NPROC:
            for rank in read_attempts(recorded / job.family_folder / job.folder_name)[-1]:
                found[rank.rank].append(rank)
    return found


def test_a_verdict_comes_of_whatever_is_found(recorded: Path) -> None:
    chance = random.Random(0)
    kinds = recorded_ranks(recorded)
    for _ in range(MIXES):
        ranks = [chance.choice(of_this_rank) for of_this_rank in kinds]
        ending = chance.choice(ENDINGS)
        verdict = judge(ranks, ending)
        named = verdict.culprit if isinstance(verdict.culprit, tuple) else (verdict.culprit,)
        found = f"{ending}: {[str(rank.folder) for rank in ranks]}: {verdict}"
        assert verdict.sentence or all(rank.exitcode == 0 for rank in ranks), found
        assert set(named) <= {None, "every rank", *range(NPROC)}, found
        assert set(verdict.ends) == set(verdict.roles) == set(range(NPROC)), found
