"""The exercises: right answers pass, what is handed out and wrong answers do not; hints, progress and copies are kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import unittest.mock
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import pytest
from conftest import RECORDS

import ddpkit
from ddpkit.course import exercises
from ddpkit.course.exercises import Task
from ddpkit.course.grading import NotYet
from ddpkit.course.lab import patched
from ddpkit.course.student import start
from ddpkit.errors import LaunchError
from ddpkit.runfolder import wire

ROOT = Path(__file__).parents[1]
TASKS = exercises.tasks()
REPORT = r"called: .*\n.*got: .*\n.*wanted: .*\n.*look next: .*\n.*ddpkit.hint"


# So many wrong answers of a task, and a right one, are run in `make test`; the others in `make labs`.
WRONG_ONES = 2


def given(kind: str) -> list[Any]:
    """A pytest parameter (task, answer, whether it is right) for each answer of this `kind`: answers, programs, functions."""
    found: list[tuple[Task, Any, bool]] = []
    for folder in ("right_answers", "wrong_answers"):
        files, right = Path(__file__).parent / folder, folder == "right_answers"
        for path in sorted(files.glob("*.py" if kind == "functions" else "*.toml")):
            found += [(task, answer, right) for task, answer in answers_in(path, kind)]
    params, before = [], Counter[tuple[str, bool]]()
    for i, (task, answer, right) in enumerate(found):
        further = kind != "answers" and before[task.name, right] >= (1 if right else WRONG_ONES)
        before[task.name, right] += 1
        name = f"{task.name}-{'right' if right else 'wrong'}-{named(answer, i)}"
        params.append(pytest.param(task, answer, right, id=name, marks=[pytest.mark.labs] if further else []))
    return params


def answers_in(path: Path, kind: str) -> list[tuple[Task, Any]]:
    """The answers in one file: t06_2_half.py answers 06.2."""
    if kind == "functions":
        return [(exercises.task("{}.{}".format(*path.stem[1:].split("_")[:2])), path)]
    tables = tomllib.loads(path.read_text())
    return [(exercises.task(name), answer) for name, table in tables.items() for answer in table.get(kind, [])]


def named(answer: Any, number: int) -> str:
    return answer.stem if isinstance(answer, Path) else str(answer.get("name", number))


def grade(one: Task, answer: Any, right: bool, says: str = REPORT) -> None:
    """Check `answer`, which must hold if it is `right`; the report on one that does not says `says`."""
    if right:
        assert ddpkit.check(one.name, answer).name == one.name
    else:
        with pytest.raises(NotYet, match=says):
            ddpkit.check(one.name, answer)
    assert bool(exercises.State.read().of(one.name)["passed"]) == right


EVIDENCE, PROGRAMS, FUNCTIONS = given("answers"), given("programs"), given("functions")


@pytest.fixture(autouse=True)
def mine(home: Path) -> None:
    """A student of one's own, with nothing done."""


def test_each_task_has_answers_of_both_sorts_and_a_place_in_a_solution() -> None:
    texts = {p.name[:2]: p.read_text() for p in (ROOT / "solutions").glob("*.ipynb")}
    answered = [(p.values[0].name, p.values[2]) for p in EVIDENCE + PROGRAMS + FUNCTIONS]
    for one in TASKS:
        text = texts[one.name[:2]]
        assert one.answer in ("run", "function", "evidence") and len(one.hints) == exercises.LEVELS, one.name
        assert one.difficulty in ("easy", "medium", "hard"), one.name
        assert f'ddpkit.check(\\"{one.name}\\"' in text and f"*{one.effort.capitalize()}.*" in text, one.name
        if one.wants:
            stub = ", ".join(f'\\"{key}\\": ...' for key in one.wants)
            assert f"answer = {{{stub}}}" in text, f"the stub of {one.name} does not name the keys of its answer"
        assert answered.count((one.name, False)) >= 2, f"{one.name} has fewer than two wrong answers"
        assert (one.name, True) in answered, f"{one.name} has no other right answer"


@pytest.mark.parametrize(("one", "answer", "right"), EVIDENCE)
def test_evidence_is_graded(one: Task, answer: dict[str, Any], right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wire.ENV_SEED, "7")
    grade(one, answer, right)


@pytest.mark.parametrize("one", [t for t in TASKS if t.wants], ids=lambda t: t.name)
@pytest.mark.parametrize("value", [unittest.mock.ANY, True, [], {}, ""], ids=repr)
def test_what_is_no_plain_value_does_not_pass(one: Task, value: Any) -> None:
    grade(one, dict.fromkeys(one.wants, value), right=False)


def test_a_refused_remedy_is_told_what_it_does() -> None:
    costly = {"remedy": "find_unused", "lies": "catch"}
    grade(exercises.task("02.3"), costly, right=False, says="'find_unused': it cures at a price. DDP walks the graph")
    other = {"remedy": "use_it", "lies": "catch"}
    grade(exercises.task("02.3"), other, right=False, says="'use_it': it cures, and trains something else.")


@pytest.mark.job
@pytest.mark.parametrize(("one", "answer", "right"), PROGRAMS)
def test_a_program_is_graded(one: Task, answer: dict[str, Any], right: bool, script: Callable[[str], str]) -> None:
    path = script(patched(one.program, answer["edits"]))
    run = ddpkit.launch(path, nproc=one.nproc, show=False, stall=one.stall, stop_on_stall=True, timeout=60)
    grade(one, run, right, answer.get("says", REPORT) if RECORDS else REPORT)


@pytest.mark.job
@pytest.mark.parametrize(("one", "path", "right"), FUNCTIONS)
def test_a_function_is_graded(one: Task, path: Path, right: bool) -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(path.read_text(), str(path), "exec"), space)
    grade(one, space["answer"], right)


@pytest.mark.job
@pytest.mark.parametrize("one", TASKS, ids=lambda t: t.name)
def test_what_is_handed_out_does_not_pass(one: Task, script: Callable[[str], str]) -> None:
    grade(one, answer_of(one, "exercises", script, one.nproc), right=False)


def answer_of(one: Task, folder: str, script: Callable[[str], str], nproc: int) -> Any:
    """What the cell before the check of this exercise answers, in its notebook of `folder`."""
    path = next((ROOT / folder).glob(f"{one.name[:2]}_*.ipynb"))
    cells = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    text = cells[next(i for i, text in enumerate(cells) if f'ddpkit.check("{one.name}"' in text) - 1]
    if one.answer == "run":
        path = script(text.partition("\n")[2])
        return ddpkit.launch(path, nproc=nproc, show=False, stall=one.stall, stop_on_stall=True, timeout=60)
    space: dict[str, Any] = {"__name__": "__main__", "ddpkit": ddpkit}
    with suppress(NotImplementedError):
        exec(compile(text, one.name, "exec"), space)
    if one.answer == "evidence":
        return space["answer"]
    return next(value for value in reversed(space.values()) if callable(value))


@pytest.mark.soak
@pytest.mark.parametrize("one", [t for t in TASKS if t.answer != "evidence"], ids=lambda t: t.name)
def test_a_solution_holds_on_three_ranks(one: Task, script: Callable[[str], str]) -> None:
    assert ddpkit.check(one.name, answer_of(one, "solutions", script, 3), nproc=3).name == one.name


def test_the_exercises_are_what_the_solutions_give() -> None:
    done = subprocess.run(
        [sys.executable, "tools/make_exercises.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_hints_come_in_three_levels_and_are_counted() -> None:
    said = [ddpkit.hint("02.1").text for _ in range(3)]
    assert said == list(exercises.task("02.1").hints)
    fourth = ddpkit.hint("02.1")
    assert fourth.text == said[2] and "(there are 3 hints; this is the last one again)" in repr(fourth)
    assert ddpkit.hint("02.1", level=1).text == said[0]
    with pytest.raises(LaunchError, match="level=7 is not one of 1 to 3"):
        ddpkit.hint("02.1", level=7)
    with pytest.raises(exercises.NoSuchTask, match=r"no exercise '2\.1'. Did you mean 12.1 or 02.1"):
        ddpkit.hint("2.1")


def test_progress_survives_a_restart_and_can_be_reset() -> None:
    with pytest.raises(NotYet):
        ddpkit.check("02.3", {"remedy": "barrier"})
    assert ddpkit.check("02.3", {"remedy": "freeze", "lies": "catch"}).name == "02.3"
    code = "import ddpkit; print(ddpkit.progress())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "✓ solved, 2 tries" in told and "easy, 10 minutes" in told and f"1 of {len(TASKS)} exercises" in told
    assert "solved" not in repr(ddpkit.reset("02.3"))


def test_seed_and_progress_are_the_workbooks_in_whatever_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(wire.ENV_HOME)
    for folder in ("exercises", "notebooks", "work/deep"):
        (home / folder).mkdir(parents=True)
    seeds = set()
    for folder in (".", "work/deep", "exercises"):
        monkeypatch.chdir(home / folder)
        seeds.add(exercises.seed())
        ddpkit.hint("02.1")
    assert len(seeds) == 1 and exercises.State.read().of("02.1")["hints"] == 3
    assert [*home.rglob(wire.EXERCISES)] == [home / ".ddpkit" / wire.EXERCISES]


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
    with zipfile.ZipFile(ROOT / "dist" / "ddp-workbook.zip") as archive:
        archive.extractall(tmp_path)
    book = tmp_path / "ddp-workbook"
    assert (book / "ddpkit" / "launcher" / "launcher.py").exists() and (book / "exercises").exists()
    assert not (book / "solutions").exists() and not (book / "tests").exists()
    notebooks = [nbformat.read(path, as_version=4) for path in book.rglob("*.ipynb")]
    cells = [cell for notebook in notebooks for cell in notebook.cells if cell.cell_type == "code"]
    assert cells and not any(cell.outputs or cell.execution_count or "BEGIN SOLUTION" in cell.source for cell in cells)
    for path in (book / "ddpkit" / "tasks").glob("*/task.toml"):
        assert b"hints" not in path.read_bytes()
    code = "from ddpkit.course.exercises import tasks; print(tasks())"
    told = subprocess.run([sys.executable, "-c", code], cwd=book, capture_output=True, text=True, check=True).stdout
    assert told.strip() == str(TASKS)
