"""Every lab and every remedy of the catalog as a real job: what fails fails as said, what cures does by the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

import ddpkit
from ddpkit import lab as labs
from ddpkit import wire
from ddpkit.lab import Lab, Remedy
from ddpkit.trial import Trials

ALL = labs.labs()
REMEDIES = [(lab, remedy) for lab in ALL for remedy in lab.remedies]

pytestmark = pytest.mark.job

_trials: dict[str, Trials] = {}


@pytest.fixture(autouse=True)
def settled(home: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One home for all: the plain run and the one process of a lab are made once."""
    monkeypatch.setenv(wire.ENV_KEEP_RUNS, "2000")
    monkeypatch.setenv(wire.ENV_HOME, str(tmp_path_factory.getbasetemp() / "labs"))


def trials(lab: Lab) -> Trials:
    if why := lab.why_not_here():
        pytest.skip(why)
    return _trials.setdefault(lab.name, Trials(lab, lab.program))


@pytest.mark.parametrize("lab", ALL, ids=lambda lab: lab.name)
def test_what_is_broken_ends_as_said(lab: Lab) -> None:
    run = trials(lab).run()
    outcome = trials(lab).outcome(run)
    assert outcome.ends == {"fails": "fails", "hangs": "hangs", "silent": "wrong"}[lab.expect], str(run)
    if lab.expect != "silent":
        assert run.culprit == lab.culprit, str(run)
        assert run.diagnosis is not None and run.diagnosis.name == (lab.page or lab.name), str(run)
    assert str(ddpkit.Run.from_folder(run.folder)) == str(run)


@pytest.mark.parametrize(("lab", "remedy"), REMEDIES, ids=lambda x: x.name)
def test_what_is_said_of_a_remedy_is_true(lab: Lab, remedy: Remedy) -> None:
    run = trials(lab).run([remedy])
    outcome = trials(lab).outcome(run, remedy.keeps)
    assert outcome.ends == (remedy.ends or "cures"), f"{outcome}\n{run}"
    assert outcome.comparable == (remedy.keeps and run.ok)


@pytest.mark.parametrize(
    ("lab", "remedy"), [(lab, r) for lab, r in REMEDIES if r.kind != "decoy"], ids=lambda x: x.name
)
def test_a_remedy_that_cures_covers_nothing_up(lab: Lab, remedy: Remedy) -> None:
    run = trials(lab).run([remedy], env={wire.ENV_FAULT: "1:1"})
    assert run.state == "failed" and run.culprit == 1, f"{run}"
    assert run.ranks[1].failure is not None and "a fault was asked for" in run.ranks[1].failure.message
