"""The figure of the ranks over time: what each span is, from recorded folders, and a PNG that says what it shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import needs_record
from test_evidence import TOLD, found, hung_run
from test_records import recorded_run, write_rank, write_run

from ddpkit import Run
from ddpkit.display.rows import rows
from ddpkit.display.timeline import Lane, lanes
from ddpkit.runfolder import wire


def drawn(run: Run) -> tuple[Lane, ...]:
    at_fault = [rank.rank for rank in run.ranks if rank.role == "culprit"]
    return lanes(run.ranks, rows(run.ranks, at_fault, run.revealed, steady=True))


def spans(lane: Lane) -> list[tuple[str, float, float]]:
    return [(span.kind, span.from_s, span.to_s) for span in lane.spans]


def test_a_wait_ends_with_the_last_join_or_never(tmp_path: Path) -> None:
    waits, sleeps = drawn(hung_run(tmp_path))
    assert spans(waits) == [
        ("computing", 0.0, 1.0),
        ("waiting", 1.0, 1.1),
        ("computing", 1.1, 2.0),
        ("stalled", 2.0, 10.0),
    ]
    assert waits.spans[-1].words == "all_reduce #2"
    assert spans(sleeps) == [("computing", 0.0, 1.1), ("silent", 1.1, 10.0)]
    assert sleeps.spans[-1].words == "line 4: time.sleep(1000)"
    assert (waits.at_fault, sleeps.at_fault) == (False, True)
    assert [lane.end for lane in (waits, sleeps)] == ["ended", "ended"]


def test_spans_follow_each_other_without_gaps(tmp_path: Path) -> None:
    for lane in drawn(hung_run(tmp_path)):
        assert lane.spans[0].from_s == 0.0 and lane.spans[-1].to_s == lane.end_s
        assert all(a.to_s == b.from_s for a, b in zip(lane.spans, lane.spans[1:], strict=False))


def test_joins_that_overlap_are_cut_at_the_next(tmp_path: Path) -> None:
    """As those of DDP's buckets do: both are begun before either is over."""
    write_run(tmp_path, {"exitcode": 0})
    for rank in (0, 1):
        write_rank(tmp_path, rank, exitcode=0)
    found(tmp_path, 0, 3, [(1.0, True), (1.5, True)])
    found(tmp_path, 1, 3, [(3.0, True), (3.5, True)])
    first, last = drawn(Run.from_folder(tmp_path))
    assert spans(first)[1:3] == [("waiting", 1.0, 1.5), ("waiting", 1.5, 3.5)]
    assert [kind for kind, *_ in spans(last)] == ["computing"] * 3
    assert first.end == "passed" and first.words == "exit code 0"


def test_a_rank_that_left_no_record_is_not_said_to_compute(tmp_path: Path) -> None:
    write_run(tmp_path)
    joining = {"at_ns": 10**8, "master": "localhost:1", "rank": 0, "world_size": 2}
    for rank in (0, 1):
        write_rank(tmp_path, rank, **(TOLD if rank == 0 else {"exitcode": -9, "signal": "SIGKILL"}))
        wire.write_record(wire.rank_folder(tmp_path, 0, rank) / wire.JOINING, joining)
    found(tmp_path, 0, 3, [(1.0, True)])
    killed = drawn(Run.from_folder(tmp_path))[1]
    assert [kind for kind, *_ in spans(killed)] == ["starting", "unrecorded"]
    assert killed.end == "failed" and killed.words == "SIGKILL"


def test_how_a_rank_ended_is_said_in_words_and_by_a_mark(tmp_path: Path) -> None:
    lost, raised = drawn(recorded_run(tmp_path))
    assert (raised.end, raised.words, raised.at_fault) == ("failed", "ValueError, exit code 1", True)
    assert not lost.at_fault


def test_the_png_is_800_px_wide_and_its_alternative_text_says_what_it_shows(tmp_path: Path) -> None:
    figure = hung_run(tmp_path).plot()
    data, about = figure._repr_mimebundle_()
    assert data["image/png"].startswith(b"\x89PNG")
    assert int.from_bytes(figure.png(100)[16:20], "big") == 800
    assert about["image/png"] == {"alt": figure.alt, "width": 800}
    assert data["text/plain"] == figure.alt == repr(figure)
    assert "rank 0 waits in all_reduce #2" in figure.alt and "rank 1 sits idle, line 4" in figure.alt


def test_without_the_reveal_the_figure_names_no_culprit(tmp_path: Path) -> None:
    hidden = Run(hung_run(tmp_path).folder, revealed=False)
    figure = hidden.plot()
    assert not any(lane.at_fault for lane in drawn(hidden))
    labels = [label.get_text() for label in figure.figure.axes[0].get_yticklabels()]
    assert labels == ["rank 0", "rank 1"]
    assert "idle" not in figure.alt and "waits" not in figure.alt


def test_eight_ranks_have_a_lane_each(tmp_path: Path) -> None:
    write_run(tmp_path, nproc=8)
    for rank in range(8):
        write_rank(tmp_path, rank, **TOLD)
        found(tmp_path, rank, 3, [(1.0, True)])
    figure = Run.from_folder(tmp_path).plot()
    assert len(figure.figure.axes[0].get_yticklabels()) == 8


def test_markup_of_mathematics_in_a_name_is_drawn_as_it_is(tmp_path: Path) -> None:
    run = hung_run(tmp_path)
    run._spec["name"] = "costs_$x_{"
    assert run.plot().png(50).startswith(b"\x89PNG")


def test_a_run_without_ranks_can_be_drawn(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert Run.from_folder(tmp_path).plot().png(50).startswith(b"\x89PNG")


def test_without_matplotlib_it_is_said_what_to_install(tmp_path: Path) -> None:
    hung_run(tmp_path)
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        f"from ddpkit import Run\nRun.from_folder({str(tmp_path)!r}).plot()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: run.plot(): matplotlib is not installed in this environment; pip install" in done.stderr


@pytest.mark.job
@needs_record
def test_a_real_job_is_drawn(home: Path) -> None:
    from conftest import BLOCKED

    import ddpkit

    (home / "blocked.py").write_text(BLOCKED)
    run = ddpkit.launch("blocked.py", stall=2, stop_on_stall=True, show=False, timeout=60)
    waits, sleeps = drawn(run)
    assert waits.spans[-1].kind == "stalled" and waits.spans[-1].words == "all_reduce #1"
    assert sleeps.spans[-1].kind == "silent" and sleeps.at_fault
    assert run.plot().png().startswith(b"\x89PNG")
