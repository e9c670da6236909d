"""The exercises: what is handed out does not pass, nor do plausible wrong answers; hints, progress and copies are kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import ddpkit
from ddpkit.course import exercises
from ddpkit.course.exercises import Task
from ddpkit.course.grading import NotYet
from ddpkit.course.lab import patched
from ddpkit.course.student import start
from ddpkit.errors import LaunchError
from ddpkit.runfolder import wire

ROOT = Path(__file__).parents[1]
WRONG = Path(__file__).parent / "wrong_answers"
TASKS = exercises.tasks()
FUNCTIONS = sorted(WRONG.glob("*.py"))


def wrong(kind: str) -> list[Any]:
    """A pytest parameter (task, wrong answer) for each answer of this `kind`, "answers" or "programs", in the TOML files."""
    tables = [table for path in sorted(WRONG.glob("*.toml")) for table in tomllib.loads(path.read_text()).items()]
    return [
        pytest.param(exercises.task(name), answer, id=f"{name}-{answer.get('name', i)}")
        for name, table in tables
        for i, answer in enumerate(table.get(kind, []))
    ]


WRONG_EVIDENCE, WRONG_PROGRAMS = wrong("answers"), wrong("programs")


@pytest.fixture(autouse=True)
def mine(home: Path) -> None:
    """A student of one's own, with nothing done."""


def task_of(path: Path) -> Task:
    """The task that a file of wrong_answers, such as t06_2_half.py, answers."""
    return exercises.task("{}.{}".format(*path.stem[1:].split("_")[:2]))


def test_each_task_has_wrong_answers_and_a_place_in_a_solution() -> None:
    texts = {p.name[:2]: p.read_text() for p in (ROOT / "solutions").glob("*.ipynb")}
    answered = [p.values[0] for p in WRONG_EVIDENCE + WRONG_PROGRAMS] + [task_of(p) for p in FUNCTIONS]
    for one in TASKS:
        assert one.answer in ("run", "function", "evidence") and len(one.hints) == exercises.LEVELS, one.name
        assert f'ddpkit.check(\\"{one.name}\\"' in texts[one.name[:2]], one.name
        assert answered.count(one) >= 2, f"{one.name} has fewer than two wrong answers"


@pytest.mark.parametrize(("one", "answer"), WRONG_EVIDENCE)
def test_wrong_evidence_does_not_pass(one: Task, answer: dict[str, Any]) -> None:
    with pytest.raises(NotYet, match=r"called: .*\n.*got: .*\n.*wanted: .*\n.*look next: .*\n.*ddpkit.hint"):
        ddpkit.check(one.name, answer)
    assert not exercises.State.read().of(one.name)["passed"]


@pytest.mark.job
@pytest.mark.parametrize(("one", "answer"), WRONG_PROGRAMS)
def test_a_wrong_program_does_not_pass(one: Task, answer: dict[str, Any], script: Callable[[str], str]) -> None:
    path = script(patched(one.program, answer["edits"]))
    run = ddpkit.launch(path, nproc=one.nproc, show=False, stall=one.stall, stop_on_stall=True, timeout=60)
    with pytest.raises(NotYet, match="called: "):
        ddpkit.check(one.name, run)


@pytest.mark.job
@pytest.mark.parametrize("path", FUNCTIONS, ids=lambda p: p.stem)
def test_a_wrong_function_does_not_pass(path: Path) -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(path.read_text(), str(path), "exec"), space)
    with pytest.raises(NotYet, match="called: "):
        ddpkit.check(task_of(path).name, space["answer"])


@pytest.mark.job
@pytest.mark.parametrize("path", sorted((ROOT / "exercises").glob("*.ipynb")), ids=lambda p: p.stem)
def test_what_is_handed_out_does_not_pass(path: Path, home: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=120, allow_errors=True, resources={"metadata": {"path": str(home)}})
    client.execute()
    checks = [c for c in notebook.cells if c.cell_type == "code" and c.source.startswith("ddpkit.check(")]
    assert checks
    for cell in checks:
        errors = [o for o in cell.outputs if o.output_type == "error"]
        assert errors and errors[0].ename in ("NotYet", "NameError"), f"{cell.source} passes as it is handed out"


def solution(one: Task) -> str:
    """The cell of the solutions that answers this exercise: the one before its check."""
    path = next((ROOT / "solutions").glob(f"{one.name[:2]}_*.ipynb"))
    cells = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    return cells[next(i for i, text in enumerate(cells) if f'ddpkit.check("{one.name}"' in text) - 1]


@pytest.mark.soak
@pytest.mark.parametrize("one", [t for t in TASKS if t.answer != "evidence"], ids=lambda t: t.name)
def test_a_solution_holds_on_three_ranks(one: Task, script: Callable[[str], str]) -> None:
    text = solution(one)
    if one.answer == "run":
        path = script(text.partition("\n")[2])
        answer: Any = ddpkit.launch(path, nproc=3, show=False, stall=one.stall, stop_on_stall=True, timeout=60)
    else:
        space: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(text, one.name, "exec"), space)
        answer = next(value for value in reversed(space.values()) if callable(value))
    assert ddpkit.check(one.name, answer, nproc=3).name == one.name


def test_the_exercises_are_what_the_solutions_give() -> None:
    done = subprocess.run(
        [sys.executable, "tools/make_exercises.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_hints_come_in_three_levels_and_are_counted() -> None:
    said = [ddpkit.hint("02.1").text for _ in range(4)]
    assert said[:3] == list(exercises.task("02.1").hints) and said[3] == said[2]
    assert ddpkit.hint("02.1", level=1).text == said[0]
    with pytest.raises(LaunchError, match="level=7 is not one of 1 to 3"):
        ddpkit.hint("02.1", level=7)
    with pytest.raises(exercises.NoSuchTask, match=r"no exercise '2\.1'. Did you mean 02.1"):
        ddpkit.hint("2.1")


def test_progress_survives_a_restart_and_can_be_reset() -> None:
    with pytest.raises(NotYet):
        ddpkit.check("02.3", {"remedy": "barrier"})
    assert ddpkit.check("02.3", {"remedy": "freeze", "lies": "catch"}).name == "02.3"
    code = "import ddpkit; print(ddpkit.progress())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "✓ solved, 2 tries" in told and f"1 of {len(TASKS)} exercises" in told
    assert "solved" not in repr(ddpkit.reset("02.3"))


def test_an_answer_of_the_wrong_kind_is_told_so() -> None:
    with pytest.raises(NotYet, match=r"02\.2 has no answer yet"):
        ddpkit.check("02.2", None)
    with pytest.raises(NotYet, match=r"got: .*a dict\n.*the run of your mended program"):
        ddpkit.check("02.2", {})
    with pytest.raises(NotYet, match=r"got: .*a int\n.*a dict with rank, layer, line"):
        ddpkit.check("02.1", 3)


def test_a_rank_that_depends_on_the_seed_cannot_be_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in ("4", "7"):
        monkeypatch.setenv(wire.ENV_SEED, seed)
        assert exercises.seed() == int(seed)
    monkeypatch.delenv(wire.ENV_SEED)
    assert (
        exercises.seed()
        == exercises.seed()
        == json.loads((Path(os.environ[wire.ENV_HOME]) / wire.EXERCISES).read_text())["seed"]
    )


def test_a_copy_is_the_students_own_and_holds_no_output(home: Path) -> None:
    cell = {"cell_type": "code", "source": "1", "execution_count": 3, "outputs": [{"output_type": "stream"}]}
    for folder in ("exercises", "notebooks"):
        (home / folder).mkdir()
        (home / folder / "02_reduction_error.ipynb").write_text(json.dumps({"cells": [cell]}))
    lesson, exercise = start("2", home / "notebooks")
    assert lesson == home / "work" / "02_reduction_error.ipynb"
    assert exercise == home / "work" / "exercises" / "02_reduction_error.ipynb"
    for copy in (lesson, exercise):
        assert json.loads(copy.read_text())["cells"] == [{**cell, "execution_count": None, "outputs": []}]
    exercise.write_text("my answers")
    assert start("", home) == [lesson, exercise] and exercise.read_text() == "my answers"
    with pytest.raises(LaunchError, match="there is no lesson '09'; there are 02"):
        start("09", home)
    with pytest.raises(LaunchError, match="is not inside the workbook"):
        start("02", home.parent)


def test_the_students_archive_holds_no_solution(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "tools/student_archive.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", "dist/ddp-workbook.zip"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    assert "exercises/02_reduction_error.ipynb" in names and "ddpkit/launcher/launcher.py" in names
    assert "solutions/" not in names and "tests/" not in names
