"""Every lab and remedy that no notebook runs, as a real job; `make labs` runs the others too: each ends as said."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import RECORDS, left_after

import ddpkit
from ddpkit.course import lab as labs
from ddpkit.course.lab import Lab, Remedy
from ddpkit.course.trial import Outcome, Trials
from ddpkit.runfolder import steps, wire

ROOT = Path(__file__).parents[1]
ALL = labs.labs()
# Of these an older torch, which records no collectives of gloo, tells less, or dies of something else.
TOLD_BY_THE_RECORD = {
    "barrier_on_rank_0",
    "collective_mismatch",
    "forward_on_rank_0",
    "loader_shared_memory",
    "metric_meets_bucket",
    "slow_save",
    "straggler",
}

pytestmark = pytest.mark.job

_trials: dict[str, Trials] = {}


class Shown:
    """The labs whose program is a cell of a notebook, and the lines that its other cells print, which nbval compares."""

    def __init__(self) -> None:
        self.programs: set[str] = set()
        self.lines: dict[str, list[str]] = {lab.name: [] for lab in ALL}
        for path in [*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "solutions").glob("*.ipynb")]:
            cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
            programs = {c["metadata"]["lab"] for c in cells if "lab" in c["metadata"]}
            benches = re.findall(r'FixBench\("(\w+)"', "\n".join("".join(c["source"]) for c in cells))
            self.programs |= programs
            for name in programs.union(benches):
                self.lines[name] += compared_lines(cells)

    def cures(self, lab: Lab, remedy: Remedy) -> bool:
        """Whether a notebook runs the lab with this remedy, and its stored output says that it cures."""
        return any(remedy.title in line and "cures" in line for line in self.lines[lab.name])


def compared_lines(cells: list[dict[str, Any]]) -> list[str]:
    """What nbval compares of the outputs of these cells, line by line."""
    found = []
    for cell in cells:
        if "nbval-ignore-output" not in cell["metadata"].get("tags", []):
            for output in cell["outputs"]:
                texts = [*output.get("text", []), *output.get("data", {}).get("text/plain", [])]
                found += "".join(texts).splitlines()
    return found


def every_lab(but: Collection[str] = ()) -> list[Any]:
    """Each lab; the tests of one stay in one process, which makes its plain run and its one process once."""
    found = []
    for lab in ALL:
        marks = [pytest.mark.xdist_group(lab.name), *([pytest.mark.labs] if lab.name in but else [])]
        found.append(pytest.param(lab, id=lab.name, marks=marks))
    return found


def every_remedy(*kinds: str) -> list[Any]:
    """Each remedy of these kinds; all but a lab's plain one, if no notebook has it, are left to `make labs`."""
    found = []
    for lab in ALL:
        for remedy in lab.remedies:
            marks = [pytest.mark.xdist_group(lab.name)]
            marks += [] if remedy.name == lab.plain and not SHOWN.cures(lab, remedy) else [pytest.mark.labs]
            if remedy.kind in kinds:
                found.append(pytest.param(lab, remedy, id=f"{lab.name}-{remedy.name}", marks=marks))
    return found


SHOWN = Shown()


@pytest.fixture(autouse=True)
def shared_home(
    home: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """One home for all, whose runs stay: the plain run and the one process of a lab are made once."""
    shared = tmp_path_factory.getbasetemp() / "labs"
    monkeypatch.setenv(wire.ENV_KEEP_RUNS, "2000")
    monkeypatch.setenv(wire.ENV_HOME, str(shared))
    yield
    left = left_after(shared, 15)
    assert not left, f"processes left behind: {left}"


def trials(lab: Lab) -> Trials:
    if why := lab.why_not_here():
        pytest.skip(why)
    return _trials.setdefault(lab.name, Trials(lab, lab.program))


@pytest.mark.parametrize("lab", every_lab(but=SHOWN.programs))
def test_what_is_broken_ends_as_said(lab: Lab) -> None:
    run = trials(lab).run()
    outcome = trials(lab).outcome(run)
    assert outcome.ends == {"fails": "fails", "hangs": "hangs", "silent": "wrong", "slow": "slow"}[lab.expect], str(run)
    if lab.name in TOLD_BY_THE_RECORD and not RECORDS:
        assert run.culprit in (lab.culprit, None), str(run)
    elif lab.expect != "slow" and (lab.expect != "silent" or lab.page):
        assert run.culprit == lab.culprit, str(run)
        assert run.diagnosis is not None and run.diagnosis.name == (lab.page or lab.name), str(run)
    assert str(ddpkit.Run.from_folder(run.folder)) == str(run)
    replicas_are_told(outcome)


@pytest.mark.parametrize(("lab", "remedy"), every_remedy("cure", "costly", "decoy"))
def test_what_is_said_of_a_remedy_is_true(lab: Lab, remedy: Remedy) -> None:
    run = trials(lab).run([remedy])
    outcome = trials(lab).outcome(run, remedy.keeps)
    assert outcome.ends == (remedy.ends or "cures"), f"{outcome}\n{run}"
    assert outcome.comparable == (remedy.keeps and run.ok)
    replicas_are_told(outcome)


def replicas_are_told(outcome: Outcome) -> None:
    """What the run says of its DDP models agrees with what the bench finds in the optimizers."""
    run, apart = outcome.run, outcome.replicas_apart
    if run.ok and apart is not None and not steps.equal(apart) and apart < float("inf"):
        assert run.replicas is not None and run.replicas.apart, f"{apart} apart: {run}"
    elif run.replicas is not None:
        assert run.replicas == "equal", f"{apart} apart: {run}"


@pytest.mark.labs
@pytest.mark.parametrize("lab", every_lab())
def test_the_plain_remedy_covers_nothing_up(lab: Lab) -> None:
    covers_nothing_up(lab, lab.remedy(lab.plain))


@pytest.mark.soak
@pytest.mark.parametrize(("lab", "remedy"), every_remedy("cure", "costly"))
def test_a_remedy_that_cures_covers_nothing_up(lab: Lab, remedy: Remedy) -> None:
    covers_nothing_up(lab, remedy)


def covers_nothing_up(lab: Lab, remedy: Remedy) -> None:
    """With the remedy in place, a fault in rank 1 ends the job, with rank 1 named."""
    run = trials(lab).run([remedy], env={wire.ENV_FAULT: "1:1"})
    assert run.state == "failed" and run.culprit == 1, f"{run}"
    assert run.ranks[1].failure is not None and "a fault was asked for" in run.ranks[1].failure.message


def test_the_coverage_page_names_labs_and_remedies_that_there_are() -> None:
    known = {lab.name: {r.name for r in lab.remedies} for lab in ALL}
    page = (ROOT / "docs" / "coverage.md").read_text()
    named = [line for line in page.splitlines() if line.startswith("| ")]
    for line in named:
        for lab, remedy in re.findall(r"`([a-z_0-9]+)/([a-z_0-9]+)`", line):
            assert remedy in known.get(lab, ()), f"{lab}/{remedy}"
        for words in re.findall(r"\blabs? ((?:`[a-z_0-9]+`(?:, )?)+)", line):
            assert not set(re.findall(r"`([a-z_0-9]+)`", words)) - set(known), words
