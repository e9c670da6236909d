"""Every recorded job is judged: the verdict names the rank and the page that are true of it, or says it cannot be told."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from jobs import Job, jobs, untrue

import ddpkit

# One process unpacks the recorded runs.
pytestmark = pytest.mark.xdist_group("recorded")

# Rules that decide fewer jobs than this are cases, unless docs/verdict.md needs them as definitions.
FEWEST = 3
DEFINITIONS = {"monitored barrier", "debt", "lock", "reported", "nobody waits"}
# No rank is judged by these.
ABOUT_THE_JOB = {"passed", "ended", "agent", "unknown", "cannot be told"}


@cache
def judged(recorded: Path, job: Job) -> ddpkit.Run:
    return ddpkit.Run.from_folder(recorded / job.family_folder / job.folder_name)


@pytest.mark.parametrize("job", jobs(), ids=lambda job: job.name)
def test_what_is_said_of_a_recorded_job_is_true(job: Job, recorded: Path) -> None:
    run = judged(recorded, job)
    assert untrue(job, run) == ""
    if run.culprit is None and run.state != "passed":
        assert "cannot be told" in str(run) or job.culprit == "nobody"


def test_each_rule_decides_at_least_three_jobs(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decided: Counter[str] = Counter()
    right: Counter[str] = Counter()
    page = (Path(__file__).parents[1] / "docs" / "verdict.md").read_text()
    comparing = page.partition("## Question 3")[2]
    for job in jobs():
        if job.family == "labs":
            continue
        run = judged(recorded, job)
        decided[run.verdict.rule] += 1
        if run.verdict.rule not in ABOUT_THE_JOB:
            assert run.verdict.certain == (f"\n**{run.verdict.rule}.**" not in comparing), f"{job.name}: {run.verdict}"
        named = list(run.culprit) if isinstance(run.culprit, tuple) else run.culprit
        right[run.verdict.rule] += named == (None if job.culprit == "nobody" else job.culprit)
    with capsys.disabled():
        print(f"\n{'rule':18} decided  right")
        for rule, count in decided.most_common():
            print(f"{rule:18} {count:7} {right[rule]:6}")
    assert not {rule for rule in decided if f"**{rule}" not in page} - ABOUT_THE_JOB
    few = {rule for rule, count in decided.items() if count < FEWEST}
    assert few <= DEFINITIONS | ABOUT_THE_JOB, f"too few jobs for a rule: {few - DEFINITIONS}"


def test_each_lab_was_recorded_as_it_is_now(recorded: Path) -> None:
    """A lab whose program changed is recorded anew: `python tools/record_verdicts.py NAME`."""
    for job in jobs():
        if job.family == "labs":
            assert ddpkit.Run.from_folder(recorded / job.family_folder / job.folder_name).script == job.script, job.name


def test_enough_is_told_and_nobody_is_blamed_in_error(recorded: Path) -> None:
    matrix = [job for job in jobs() if job.family not in ("labs", "parting")]
    parting = [job for job in jobs() if job.family == "parting"]
    assert len(matrix) >= 233
    assert sum(not job.untold for job in matrix) >= 190
    assert len(parting) >= 26
    assert sum(not job.untold for job in parting) >= 22
    assert sum(job.instead is not None for job in jobs()) <= 2
