"""What is shown of ranks that stood still: rows, text and HTML, from recorded folders."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_records import recorded_run, write_rank, write_run

from ddpkit import Run
from ddpkit.display.html import as_html
from ddpkit.display.rows import rows
from ddpkit.display.text import first_paragraph, short_file
from ddpkit.runfolder import wire
from ddpkit.runfolder.frames import Frame
from ddpkit.watcher.look import gather_stacks, withdraw

SCRIPT = "import torch\nx = torch.ones(1)\ndist.all_reduce(x)\ntime.sleep(1000)\n"
TOLD = {"told": "SIGTERM", "told_ns": 9 * 10**9, "exitcode": -15, "signal": "SIGTERM"}
LIBRARY = "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def collective(seq: int, at_s: float, done: bool, script: str) -> dict[str, Any]:
    """One entry of a rank's flight recorder, joined `at_s` seconds after the start."""
    where = {"file": script, "line": 3, "function": "step", "source": "dist.all_reduce(x)", "own": True}
    group = {"group": "0", "group_name": "default_pg", "ranks": [0, 1], "p2p": False}
    call = {"seq": seq, "op": "all_reduce", "sizes": [[1]], "dtypes": ["Float"], "where": where}
    return {**group, **call, "at_ns": int(at_s * 1e9), "done": done}


def found(
    folder: Path, rank: int, line: int, joins: list[tuple[float, bool]], silent_s: float = 6.0, why: str = "stall"
) -> None:
    """Write down how a look found this rank: its stack at `line` of the script, and what it had joined when."""
    own, script = wire.rank_folder(folder, 0, rank), str(folder / "train.py")
    look = {"at_ns": 8 * 10**9, "why": why, "state": "sleeping", "busy": 0.01, "silent_s": silent_s}
    wire.write_record(own / wire.LOOK, {**look, "rss_mib": 200.0, "workers": []})
    entries = [collective(i, at_s, done, script) for i, (at_s, done) in enumerate(joins, 1)]
    wire.write_record(own / wire.COLLECTIVES, {"at_ns": 0, "entries": entries})
    library = f'  File "{LIBRARY}", line 7 in all_reduce\n' if line == 3 else ""
    stack = f'{library}  File "{script}", line {line} in step\n  File "{script}", line 9 in <module>\n'
    started = f'  File "{Path(wire.__file__).parents[1]}/recorder/bootstrap.py", line 1 in run\n'
    (own / wire.STACK).write_text(f"Thread MainThread (most recent call first):\n{stack}{started}")


def hung_run(folder: Path, silent_s: float = 6.0, pid: int = 1, last_s: float = 2.0) -> Run:
    """Rank 0 waits in all_reduce #2, which rank 1 never joined: it sleeps at line 4."""
    write_run(folder)
    (folder / wire.JOB).write_text(json.dumps({"name": "t", "nproc": 2, "stall_s": 5.0}))
    (folder / "train.py").write_text(SCRIPT)
    wire.write_record(folder / wire.END, {"reason": "stall", "notes": []})
    for rank in (0, 1):
        write_rank(folder, rank, pid=pid, **TOLD)
    found(folder, 0, 3, [(1.0, True), (last_s, False)], silent_s)
    found(folder, 1, 4, [(1.1, True)], silent_s)
    return Run.from_folder(folder)


def test_the_text_holds_sentence_diagnosis_and_a_row_for_each_rank(tmp_path: Path) -> None:
    text = str(hung_run(tmp_path)).splitlines()
    assert text[0] == "t → hung · 2 ranks · rank 1: sits idle, line 4: time.sleep(1000)"
    assert text[1].startswith("  Rank 1 never joined all_reduce #2")
    assert text[2].startswith("  diagnosis: skipped_collective (certain): ")
    assert text[2].endswith("; ddpkit explain skipped_collective")
    assert text[3:] == [
        "  rank 0  waits in all_reduce #2  line 3: dist.all_reduce(x)",
        "  rank 1  sits idle               line 4: time.sleep(1000) · last joined all_reduce #1",
    ]


def test_text_and_html_hold_no_seconds_and_no_pids(tmp_path: Path) -> None:
    first = hung_run(tmp_path / "a")
    second = hung_run(tmp_path / "b", silent_s=6.4, pid=77, last_s=2.2)
    assert str(first) == str(second)
    assert first._repr_html_() == second._repr_html_()
    assert first.plot().alt == second.plot().alt


def test_the_html_folds_the_stacks_and_keeps_the_libraries_out(tmp_path: Path) -> None:
    html = hung_run(tmp_path)._repr_html_()
    assert "<summary>stacks, your own lines</summary>" in html
    assert "line 4: time.sleep(1000)   (step, train.py)" in html
    assert "distributed_c10d" not in html and "bootstrap" not in html
    assert "<summary>diagnosis: skipped_collective (certain)" in html


def test_below_a_live_view_the_html_is_folded_under_its_headline(tmp_path: Path) -> None:
    run = hung_run(tmp_path)
    assert as_html(run, below_view=True).startswith('<div class="ddpkit-run"><details><summary><b>t</b>')
    assert as_html(run).startswith('<div class="ddpkit-run"><details open><summary>')


def test_without_the_reveal_only_facts_are_shown(tmp_path: Path) -> None:
    hidden = Run(hung_run(tmp_path).folder, revealed=False)
    assert str(hidden).splitlines() == [
        "t → hung · 2 ranks",
        "  rank 0  ended by SIGTERM  line 3: dist.all_reduce(x) · last joined all_reduce #2",
        "  rank 1  ended by SIGTERM  line 4: time.sleep(1000) · last joined all_reduce #1",
    ]
    for said in ("never joined", "diagnosis", "waits", "idle", "fault"):
        assert said not in hidden._repr_html_() and said not in str(hidden)


def test_rows_of_a_living_job_without_the_reveal_hold_the_systems_word(tmp_path: Path) -> None:
    run = hung_run(tmp_path)
    for rank in (0, 1):
        (wire.rank_folder(tmp_path, 0, rank) / wire.EXIT).unlink()
    living = Run.from_folder(run.folder).ranks
    assert [(row.state, row.tone) for row in rows(living, [1], revealed=False)] == [("sleeping", "")] * 2
    shown = rows(living, [1])
    assert [(row.words, row.tone) for row in shown] == [("waits in all_reduce #2", "waiting"), ("sits idle", "fault")]
    assert shown[0].silent_s == 6.0 and [frame.own for frame in shown[0].stack] == [False, True, True]


def test_where_a_rank_happened_to_be_when_another_failed_is_kept_out_of_the_text(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    own = wire.rank_folder(tmp_path, 0, 0)
    (own / wire.FAILURE).unlink()
    wire.write_record(own / wire.EXIT, {"pid": 1, "at_ns": 10**10, **TOLD})
    (tmp_path / "train.py").write_text(SCRIPT)
    found(tmp_path, 0, 4, [(1.0, True)], silent_s=0.3, why="failure")
    run = Run.from_folder(run.folder)
    assert "line 4" not in str(run) and "line 4" not in run._repr_html_()
    assert rows(run.ranks)[0].where == "line 4: time.sleep(1000)"


def test_a_failed_run_stays_within_a_dozen_lines(tmp_path: Path) -> None:
    text = str(recorded_run(tmp_path)).splitlines()
    assert len(text) <= 12
    assert text[2].startswith("  diagnosis: own_exception (certain): ")


def test_passed_runs_stay_short(tmp_path: Path) -> None:
    write_run(tmp_path, {"exitcode": 0})
    for rank in (0, 1):
        write_rank(tmp_path, rank, exitcode=0)
    run = Run.from_folder(tmp_path)
    assert str(run) == "t → passed · 2 ranks"
    assert "<details" not in run._repr_html_() and "<table" not in run._repr_html_()


@pytest.mark.parametrize(
    ("file", "own", "short"),
    [
        ("/home/me/train.py", True, "train.py"),
        ("/tmp/ipykernel_12/345.py", True, "the cell"),
        (LIBRARY, False, "torch/distributed/distributed_c10d.py"),
        ("/usr/lib/python3.11/threading.py", False, "threading.py"),
    ],
)
def test_files_are_named_alike_on_every_machine(file: str, own: bool, short: str) -> None:
    assert short_file(Frame(file, 1, "f", "", own)) == short


def test_what_a_rank_wrote_at_its_end_outlives_the_look_before(tmp_path: Path) -> None:
    """The ranks are those of a moment ago: rank 0 has written its end since, and nobody knows yet that it is over."""
    run = hung_run(tmp_path)
    seen = [replace(rank, exitcode=None) for rank in run.ranks]
    folders = [wire.rank_folder(tmp_path, 0, rank) for rank in (0, 1)]
    for folder in folders:
        shutil.copy(folder / wire.COLLECTIVES, folder / wire.COLLECTIVES_ASKED)
    (folders[1] / wire.COLLECTIVES).unlink()
    withdraw(seen)
    assert [bool(rank.collectives) for rank in seen] == [True, False]
    assert not any((folder / name).exists() for folder in folders for name in (wire.LOOK, wire.COLLECTIVES_ASKED))


def test_every_page_opens_with_a_sentence_that_stands_alone() -> None:
    from dataclasses import replace

    from ddpkit.diagnosis.pages import pages
    from ddpkit.diagnosis.run import Diagnosis

    blank = Diagnosis("", "", "", None, (), (), "certain", "")
    for page in pages():
        said = first_paragraph(replace(blank, name=page.name))
        assert said and said[0] not in "#>|-" and said.endswith((".", "`", ")", "`.", "?")), page.name


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell who handles a signal")
def test_a_rank_that_has_become_another_program_is_not_sent_the_signal_for_its_stack(tmp_path: Path) -> None:
    """It has no handler for it, and would die."""
    other = subprocess.Popen(["sleep", "60"])
    try:
        write_run(tmp_path)
        write_rank(tmp_path, 0)
        rank = replace(Run.from_folder(tmp_path).ranks[0], pid=other.pid, exitcode=None)
        assert rank.stack_signal == 44
        gather_stacks([rank])
        assert other.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
    finally:
        other.kill()
        other.wait()
