"""`ddpkit.answer` and `reveal`: no verdict before an answer, and each answer beside the evidence that decides."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from IPython.core.formatters import DisplayFormatter
from ipywidgets import Widget
from test_records import recorded_run

import ddpkit
from ddpkit.course.answer import QUESTIONS, Question, ask
from ddpkit.course.answer_view import AnswerView
from ddpkit.display.view import RunView
from ddpkit.errors import LaunchError
from ddpkit.run import Run
from ddpkit.runfolder import wire

ROOT = Path(__file__).resolve().parents[1]
LESSONS = tomllib.loads(QUESTIONS.read_text())
ANSWERS = tomllib.loads((ROOT / "tests" / "answers.toml").read_text())
PROGRAM = "import torch\n\nx()\nprint('step 0')\n"


@pytest.fixture
def hidden(tmp_path: Path) -> Run:
    """A run whose rank 1 raised, its verdict held back."""
    run = recorded_run(tmp_path / "run")
    job = json.loads((run.folder / wire.JOB).read_text())
    (run.folder / wire.JOB).write_text(json.dumps({**job, "script": "t.py"}))
    (run.folder / "t.py").write_text(PROGRAM)
    return Run(run.folder, revealed=False)


def test_nothing_is_revealed_before_an_answer(hidden: Run, capsys: pytest.CaptureFixture[str]) -> None:
    before = str(hidden)
    assert str(hidden.reveal()) == before
    assert "Answer first: ddpkit.answer(run) asks." in capsys.readouterr().out
    assert hidden.reveal(anyway=True).verdict.sentence in str(hidden.reveal(anyway=True))


def test_a_right_and_a_wrong_answer_stand_beside_the_verdict(hidden: Run) -> None:
    asked = ask(hidden, [Question("Who?", ("rank 0", "rank 1"), ("rank 1",), "It raised."), *answer_lines(hidden)])
    asked.give(0, "line 3")
    shown = hidden.reveal()
    assert hidden.verdict.sentence in str(shown)
    assert '✗ Who? You said "rank 0": it is "rank 1". It raised.' in str(shown)
    assert '✓ At which line? You said "line 3: x()": right.' in str(shown)
    assert "it is &quot;rank 1&quot;" in shown._repr_html_() and "You said" not in str(hidden)


def answer_lines(run: Run) -> tuple[Question, ...]:
    return ddpkit.answer(run).questions[1:]


def test_the_verdict_answers_what_any_run_can_be_asked(hidden: Run) -> None:
    who, line = ddpkit.answer(hidden).questions
    assert who.offers == ("rank 0", "rank 1", "every rank", "cannot be told") and who.right == ("rank 1",)
    assert line.offers == ("line 1: import torch", "line 3: x()", "line 4: print('step 0')")


def test_the_first_answer_counts(hidden: Run) -> None:
    ddpkit.answer(hidden).give(0, "line 1")
    ddpkit.answer(hidden).give(1, "line 3")
    assert [one.said for one in hidden.answers] == ["rank 0", "line 1: import torch"]
    assert Run.from_folder(hidden.folder).answers == hidden.answers


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ((1,), "2 questions, and 1 answers"),
        ((7, "line 1"), "'rank 7' is not one of the answers|7 is not one of the answers"),
        ((1, "line"), "'line' is not one of the answers to 'At which line\\?'"),
    ],
)
def test_what_is_no_answer_is_refused(hidden: Run, said: tuple[str | int, ...], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        ddpkit.answer(hidden).give(*said)
    assert not hidden.answers


def test_a_file_answers_where_nobody_reads(hidden: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answers.toml").write_text('"" = [1, "line 3"]\n')
    monkeypatch.setenv(wire.ENV_ANSWERS, str(tmp_path / "answers.toml"))
    ddpkit.answer(hidden)
    assert [one.right for one in hidden.answers] == [True, True]
    with pytest.raises(LaunchError, match="has no answers for '02'"):
        ddpkit.answer(hidden, "02")
    with pytest.raises(LaunchError, match="no questions for lesson '99'; there are for 01, 02"):
        ddpkit.answer(hidden, "99")


def test_the_widgets_keep_an_answer_when_all_is_chosen(hidden: Run) -> None:
    view = AnswerView(ddpkit.answer(hidden))
    assert view._button.disabled and "2 still to answer" in view._say.value
    view._choices[0].value = "rank 1"
    assert view._button.disabled and "1 still to answer" in view._say.value
    view._choices[1].value = "line 3: x()"
    view._button.click()
    assert [one.right for one in hidden.answers] == [True, True]
    assert view._button.disabled and "reveal() shows it beside the verdict" in view._say.value
    assert AnswerView(ddpkit.answer(hidden))._choices[0].disabled


@pytest.mark.parametrize("ipywidgets", ["7", "8"])
def test_widgets_of_both_generations_show_the_same(
    ipywidgets: str, hidden: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ipywidgets 7 gives a widget no `_repr_mimebundle_`, and shows the live view by its repr."""
    if ipywidgets == "7":
        monkeypatch.delattr(Widget, "_repr_mimebundle_", raising=False)
    formats = DisplayFormatter().format
    for shown in (ddpkit.answer(hidden), ddpkit.FixBench("unused_parameters")):
        data, _ = formats(shown)
        assert data["text/plain"] == repr(shown) and len(data) == 2
        assert data["application/vnd.jupyter.widget-view+json"]["model_id"]
    view = RunView()
    assert view._repr_mimebundle_()[0]["text/plain"] == repr(view) == "live view of no job yet: 0 ranks"


@pytest.mark.parametrize("lesson", [lesson for lesson in LESSONS if lesson != "13"])
def test_each_lessons_questions_fit_its_program(lesson: str, hidden: Run) -> None:
    """Asked before the reveal; every right line is one line of the program, and every answer of the tests is on offer."""
    (path,) = (ROOT / "notebooks").glob(f"{lesson}_*.ipynb")
    cells = ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    program = next(text for text in cells if text.startswith("%%torchrun"))
    (hidden.folder / "t.py").write_text(program)
    asked = [i for i, text in enumerate(cells) if f'ddpkit.answer(broken, "{lesson}")' in text]
    revealed = next(i for i, text in enumerate(cells) if ".reveal()" in text)
    assert len(asked) == 1 and asked[0] < revealed
    questions = ddpkit.answer(hidden, lesson).questions
    for question, said, one in zip(questions, ANSWERS[lesson], LESSONS[lesson], strict=True):
        assert question.offered(said) and question.decides
        assert len(question.right) == 1 and set(question.right) <= set(question.offers), one


def test_a_bench_waits_for_the_predictions_that_it_has_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = ddpkit.FixBench("unused_parameters")
    asked = bench.predict("barrier", "freeze")
    assert [len(question.offers) for question in asked.questions] == [4, 4]
    with pytest.raises(LaunchError, match="predict first what 'freeze' will come to"):
        bench.run("freeze")
    asked.give("fails", "cures")
    assert asked.kept and "Your predictions are kept" in repr(asked) and not bench.predict("catch").kept
    (tmp_path / "answers.toml").write_text('[unused_parameters]\ncatch = "fails"\n')
    monkeypatch.setenv(wire.ENV_ANSWERS, str(tmp_path / "answers.toml"))
    assert bench.predict("catch").kept


def test_a_lesson_asks_for_predictions_without_a_run() -> None:
    asked = ddpkit.answer(None, "13")
    with pytest.raises(LaunchError, match="nothing is answered yet"):
        _ = asked.said
    assert asked.give(*ANSWERS["13"]).said == tuple(ANSWERS["13"]) and asked.kept
    with pytest.raises(LaunchError, match="is asked about a run; give the run"):
        ddpkit.answer(None, "02")


def test_one_answer_is_wrong_so_that_a_notebook_shows_the_response() -> None:
    wrong = []
    for lesson, questions in LESSONS.items():
        for said, question in zip(ANSWERS[lesson], questions, strict=True):
            if said not in question.get("right", [said]) and "offers" in question:
                wrong.append(said)
    assert wrong == ["they are lost", "step 4"]
