"""`Run` rebuilt from recorded folders: the verdict from what was written down, without processes and without torch."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ddpkit import Run
from ddpkit.runfolder import wire

PEER_LOST = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:{port}. This is typically caused by a remote worker crashing."
)
GAVE_UP = "[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"


def write_rank(folder: Path, rank: int, failure: dict[str, Any] | None = None, **ended: Any) -> None:
    """Write down one rank of a run as keeper and bootstrap would have."""
    own = wire.rank_folder(folder, 0, rank)
    own.mkdir(parents=True, exist_ok=True)
    started = {"at_ns": 0, "pid": 1, "rank": rank, "local_rank": rank, "world_size": 2, "stack_signal": 44}
    wire.write_record(own / wire.STARTED, started)
    default = {"pid": 1, "exitcode": 1, "signal": None, "at_ns": 10**10, "told": None, "told_ns": 0, "killed_for": ""}
    wire.write_record(own / wire.EXIT, {**default, **ended})
    if failure:
        where = {"file": "t.py", "line": 3, "function": "f", "source": failure.pop("source", "x()"), "own": True}
        record = {"at_ns": 10**9, "type": "ValueError", "message": "boom", "chain": [], "traceback": "", "frames": []}
        wire.write_record(own / wire.FAILURE, {**record, "where": where, **failure})


def write_run(folder: Path, agent: dict[str, Any] | None = None, nproc: int = 2) -> Path:
    """Write down a run of `nproc` ranks; the ranks come by `write_rank`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / wire.JOB).write_text(json.dumps({"name": "t", "nproc": nproc, "timeout_s": 5.0}))
    wire.write_record(folder / wire.AGENT_RECORD, {"exitcode": 1, "signal": None, "told": None, **(agent or {})})
    return folder


def recorded_run(folder: Path, message: str = "boom", source: str = "x()") -> Run:
    """A run whose rank 1 raised ValueError and whose rank 0 lost its peer."""
    write_run(folder)
    write_rank(folder, 0, {"type": "RuntimeError", "message": PEER_LOST.format(port=41669), "at_ns": 1})
    write_rank(folder, 1, {"message": message, "source": source})
    return Run.from_folder(folder)


@pytest.mark.parametrize("first", [0, 1], ids=["all started", "rank 0 never started"])
def test_an_early_exit_is_told_with_its_line_wherever_the_peer_was_lost(first: int, tmp_path: Path) -> None:
    """One rank was still in `init_process_group`, which the other had come through."""
    write_run(tmp_path, nproc=2 + first)
    lost = {"type": "RuntimeError", "message": PEER_LOST.format(port=1), "source": "dist.init()"}
    write_rank(tmp_path, first, lost)
    write_rank(tmp_path, first + 1, exitcode=0, at_ns=2 * 10**9)
    waited, left = (wire.rank_folder(tmp_path, 0, rank) for rank in (first, first + 1))
    for own in (waited, left):
        wire.write_record(own / wire.JOINING, {"at_ns": 1, "rank": -1, "master": "h:1", "world_size": 2})
    came_through = {"at_ns": 1, "enqueued": {}, "completed": {}, "entries": [], "groups": [[first, first + 1]]}
    wire.write_record(left / wire.COLLECTIVES, came_through)
    left_at = {"file": "t.py", "line": 6, "function": "f", "source": "os._exit(0)", "own": True}
    wire.write_record(left / wire.FINISHED, {"at_ns": 1, "left_at": left_at})
    verdict = Run.from_folder(tmp_path).verdict
    there = f"rank {first} lost it at line 3: dist.init()"
    told = f"Rank {first + 1} left early with exit code 0 at line 6: os._exit(0); {there}."
    assert (verdict.culprit, verdict.sentence) == (first + 1, told)


def test_the_victims_earlier_stamp_does_not_make_it_the_culprit(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    assert run.culprit == 1
    assert run.ranks[0].words == "lost its peer: a consequence"


def test_what_ranks_raised_alike_is_quoted_as_one_ranks_words_where_they_differ(tmp_path: Path) -> None:
    write_run(tmp_path, nproc=3)
    write_rank(tmp_path, 0, told="SIGTERM", told_ns=2 * 10**9, exitcode=-15, signal="SIGTERM")
    for rank in (1, 2):
        write_rank(tmp_path, rank, {"type": "FileNotFoundError", "message": f"part-{rank}.bin"})
    found = Run.from_folder(tmp_path)
    assert found.culprit == (1, 2)
    assert "raised FileNotFoundError; rank 1 raised FileNotFoundError: part-1.bin" in found.verdict.sentence


@pytest.mark.parametrize(("by", "culprit"), [("map_fun()", 1), ("reduce_fun(all_data)", "every rank")])
def test_of_a_checkpoint_that_every_rank_is_told_of_the_rank_in_which_it_failed(
    by: str, culprit: object, tmp_path: Path
) -> None:
    """What fails when the plans of all ranks come together fails on rank 0, whoever's plan it was."""
    write_run(tmp_path)
    told = f"CheckpointException ranks:dict_keys([1])\nTraceback:\n    {by}\nRuntimeError: Missing key\n"
    for rank in (0, 1):
        write_rank(tmp_path, rank, {"type": "CheckpointException", "message": told})
    found = Run.from_folder(tmp_path)
    assert found.culprit == culprit
    assert "dict_keys([1]) RuntimeError: Missing key (line 3" in found.verdict.sentence
    assert (found.ranks[0].words == "was told that a rank had failed: a consequence") == (culprit == 1)


def test_of_joins_two_errors_the_one_who_ran_out_of_inputs_is_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    told = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
    write_rank(tmp_path, 0, {"type": "RuntimeError", "message": told, "at_ns": 1})
    write_rank(tmp_path, 1, {"type": "RuntimeError", "message": "Rank 1 exhausted all inputs."})
    assert Run.from_folder(tmp_path).culprit == 1


def test_text_and_html_hold_nothing_that_varies(tmp_path: Path) -> None:
    first, second = recorded_run(tmp_path / "a"), recorded_run(tmp_path / "b", message="boom")
    failure = wire.rank_folder(tmp_path / "b", 0, 0) / wire.FAILURE
    failure.write_text(failure.read_text().replace("41669", "5"))
    assert str(first) == str(second)
    assert first._repr_html_() == second._repr_html_()


def test_a_tie_is_said(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_rank(tmp_path, 0, {"message": "one", "at_ns": 10**9})
    write_rank(tmp_path, 1, {"type": "EOFError", "message": "other", "at_ns": 10**9 + 300_000})
    run = Run.from_folder(tmp_path)
    assert run.culprit is None
    assert run.verdict.sentence.startswith("A tie: rank 0 raised ValueError: one")


def test_of_three_ranks_two_that_fail_alike_are_both_named(tmp_path: Path) -> None:
    write_run(tmp_path, nproc=3)
    write_rank(tmp_path, 0, told="SIGTERM", told_ns=2 * 10**9, exitcode=-15, signal="SIGTERM")
    write_rank(tmp_path, 1, {"at_ns": 10**9 + 5})
    write_rank(tmp_path, 2, {"at_ns": 10**9})
    run = Run.from_folder(tmp_path)
    assert run.culprit == (1, 2)
    assert run.ranks[0].words == "ended by torchrun"
    assert "Ranks 1 and 2 raised ValueError: boom" in str(run)


def test_an_error_raised_from_a_lost_peer_is_a_consequence(tmp_path: Path) -> None:
    write_run(tmp_path)
    chain = [{"type": "RuntimeError", "message": PEER_LOST.format(port=1)}]
    write_rank(tmp_path, 0, {"message": "could not average the loss", "at_ns": 1, "chain": chain})
    write_rank(tmp_path, 1, exitcode=-9, signal="SIGKILL")
    run = Run.from_folder(tmp_path)
    assert run.culprit == 1
    assert "was killed by SIGKILL, not sent by torchrun" in str(run)


def test_a_timeout_alone_blames_nobody(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_rank(tmp_path, 0, {"type": "RuntimeError", "message": GAVE_UP})
    write_rank(tmp_path, 1, told="SIGTERM", told_ns=2 * 10**9, exitcode=-15, signal="SIGTERM")
    run = Run.from_folder(tmp_path)
    assert run.culprit is None
    assert "cannot be told" in run.verdict.sentence


def test_a_failure_stamped_after_sigterm_is_no_failure_of_its_own(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_rank(tmp_path, 0, {"message": "cleaning up", "at_ns": 3 * 10**9}, told="SIGTERM", told_ns=2 * 10**9)
    write_rank(tmp_path, 1, {"message": "boom"})
    run = Run.from_folder(tmp_path)
    assert run.culprit == 1
    assert run.ranks[0].role == "consequence"


def test_reveal_false_keeps_the_verdict_back(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    hidden = Run(tmp_path, revealed=False)
    assert "consequence" not in str(hidden) and run.verdict.sentence not in str(hidden)
    assert "raised RuntimeError" in str(hidden) and "raised ValueError" in str(hidden)
    assert "consequence" not in hidden._repr_html_()
    assert str(hidden.reveal(anyway=True)) == str(run)


def test_a_bundle_holds_the_run_and_rebuilds_elsewhere(home: Path, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run")
    (wire.rank_folder(tmp_path / "run", 0, 0) / wire.RETURNED).write_bytes(b"pickle")
    bundle = run.bundle(tmp_path / "report.zip")
    with zipfile.ZipFile(bundle) as archive:
        assert not [n for n in archive.namelist() if n.endswith(".pkl")]
        archive.extractall(tmp_path / "elsewhere")
    assert str(Run.from_folder(tmp_path / "elsewhere" / "run")) == str(Run.from_folder(bundle)) == str(run)


def test_a_bundle_with_pickled_values_is_opened_without_them(home: Path, tmp_path: Path) -> None:
    bundle = recorded_run(tmp_path / "run").bundle(tmp_path / "report.zip")
    with zipfile.ZipFile(bundle, "a") as archive:
        archive.writestr(f"run/ranks/attempt_0/rank_0/{wire.RETURNED}", b"pickle")
    assert not list(Run.from_folder(bundle).folder.rglob("*.pkl"))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no job\.json; give a folder below"):
        Run.from_folder(tmp_path)
    zipfile.ZipFile(tmp_path / "empty.zip", "w").close()
    with pytest.raises(FileNotFoundError, match=r"empty\.zip holds no job\.json; give a zip that run\.bundle"):
        Run.from_folder(tmp_path / "empty.zip")


def test_values_of_a_foreign_folder_are_not_unpickled(tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match="could run foreign code"):
        _ = recorded_run(tmp_path).returned


def test_a_half_written_record_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": ')
    assert wire.read_record(tmp_path / "x.json") is None


def test_what_a_rank_raised_after_it_was_told_to_end_is_said_of_it(tmp_path: Path) -> None:
    """Rank 1 raised first, and torchrun told rank 0 to end; a handler let that finish its table, on which it raised by itself."""
    write_run(tmp_path)
    write_rank(tmp_path, 1)
    told: dict[str, Any] = {"told": "SIGTERM", "told_ns": 2 * 10**9}
    write_rank(tmp_path, 0, {"type": "ZeroDivisionError", "message": "by zero", "at_ns": 3 * 10**9}, **told)
    run = Run.from_folder(tmp_path)
    assert run.culprit == 1
    assert run.ranks[0].words == "ended by torchrun, and raised ZeroDivisionError then"
    write_rank(tmp_path, 0, {"type": "SystemExit", "message": "exit code 1", "at_ns": 3 * 10**9}, **told)
    assert Run.from_folder(tmp_path).ranks[0].words == "ended by torchrun"


def test_a_rank_that_fails_because_the_job_is_ended_is_shown_where_it_stood(tmp_path: Path) -> None:
    """The first SIGTERM of an ended job reaches a peer before its own does."""
    write_run(tmp_path)
    job = {"name": "t", "nproc": 2, "stall_s": 5.0}
    wire.write_record(tmp_path / wire.JOB, job)
    wire.write_record(tmp_path / wire.END, {"reason": "stall"})
    write_rank(tmp_path, 0, told="SIGTERM", told_ns=10**9, exitcode=-15, signal="SIGTERM")
    write_rank(tmp_path, 1, {"type": "RuntimeError", "message": PEER_LOST.format(port=1), "at_ns": 2 * 10**9})
    looked = {
        "at_ns": 10**8,
        "why": "stall",
        "state": "idle",
        "silent_s": 5.0,
        "busy": 0.0,
        "inside": [],
        "workers": [],
    }
    wire.write_record(wire.rank_folder(tmp_path, 0, 1) / wire.LOOK, looked)
    run = Run.from_folder(tmp_path)
    assert run.state == "hung" and run.ranks[1].failure is not None
    assert "lost its peer" not in run.rows[1].words, str(run)
