"""What no job of this machine leaves behind is judged from written records: NCCL, a GPU at work, a torch without records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from test_records import GAVE_UP, write_rank, write_run

from ddpkit import Run
from ddpkit.runfolder import wire

ENDED = {"exitcode": -15, "signal": "SIGTERM", "told": "SIGTERM", "told_ns": 9 * 10**9}
WATCHDOG = (
    "[rank0]:[E1121 10:00:00.000 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600029 milliseconds "
    "before timing out.\n"
    "[rank0]:[E1121 10:00:00.000 ProcessGroupNCCL.cpp:1785] last enqueued work: 12, last completed work: 11\n"
)
IN_TORCH = '  File "/lib/site-packages/torch/distributed/distributed_c10d.py", line 3 in all_reduce\n'
IN_BACKWARD = '  File "/lib/site-packages/torch/autograd/graph.py", line 9 in _engine_run_backward\n'


def write_look(
    folder: Path, rank: int, joined: Sequence[int], line: int, inside: str = "", done: bool = True, **look: Any
) -> None:
    """Write down what a look found: all_reduces at the lines `joined`, the last of them `done` or not, and the stack."""
    own = wire.rank_folder(folder, 0, rank)
    entries = []
    for seq, at in enumerate(joined, 1):
        where = {"file": "/t.py", "line": at, "function": "f", "source": f"x{at}()", "own": True}
        entry = {"seq": seq, "op": "all_reduce", "p2p": False, "group": "0", "group_name": "default_pg", "ranks": []}
        entry |= {"sizes": [[4]], "dtypes": ["Float"], "at_ns": seq, "done": done or seq < len(joined), "where": where}
        entries.append(entry)
    wire.write_record(own / wire.COLLECTIVES, {"at_ns": 1, "enqueued": {}, "completed": {}, "entries": entries})
    found = {"at_ns": 1, "why": "stall", "state": "sleeping", "busy": 0.0, "silent_s": 9.0, "rss_mib": 1.0}
    wire.write_record(own / wire.LOOK, {**found, "workers": [], "gpu_busy": None, **look})
    (own / wire.STACK).write_text(f'Stack (most recent call first):\n{inside}  File "/t.py", line {line} in f\n')


def hung(folder: Path, *looks: dict[str, Any]) -> Run:
    """A run that was ended at a stall, with one look for each rank."""
    write_run(folder, nproc=len(looks))
    wire.write_record(folder / wire.JOB, {**(wire.read_record(folder / wire.JOB) or {}), "stall_s": 10.0})
    wire.write_record(folder / wire.END, {"reason": "stall", "notes": []})
    for number, look in enumerate(looks):
        write_rank(folder, number, **ENDED)
        write_look(folder, number, **look)
    return Run.from_folder(folder)


def test_nobody_is_blamed_for_honest_work(tmp_path: Path) -> None:
    works: dict[str, Any] = {"joined": [5] * 3, "line": 8, "busy": 1.0}
    run = hung(tmp_path, works, {**works, "line": 9})
    assert (run.culprit, run.verdict.kind) == (None, "busy")
    assert "No rank waits for another" in run.verdict.sentence


def test_a_gpu_that_computes_is_honest_work(tmp_path: Path) -> None:
    works: dict[str, Any] = {"joined": [5] * 3, "line": 8, "gpu_busy": 1.0}
    assert hung(tmp_path, works, {**works, "line": 9}).verdict.kind == "busy"


def test_a_gpu_that_spins_in_an_open_collective_waits(tmp_path: Path) -> None:
    """On NCCL the stack is at a look at a value."""
    waits = {"joined": [5] * 4, "done": False, "line": 8, "gpu_busy": 1.0}
    run = hung(tmp_path, waits, {"joined": [5] * 3, "line": 9, "gpu_busy": 0.0})
    assert (run.culprit, run.verdict.kind) == (1, "never_joined")


def test_a_long_backward_is_no_wait(tmp_path: Path) -> None:
    computes = {"joined": [5] * 3, "line": 5, "inside": IN_BACKWARD, "busy": 1.0}
    run = hung(tmp_path, computes, {"joined": [5] * 4, "done": False, "line": 5, "inside": IN_TORCH})
    assert (run.culprit, run.verdict.kind) == (0, "never_joined")
    assert "it computes at line 5" in run.verdict.sentence


def test_who_waits_for_the_disk_does_not_just_sit(tmp_path: Path) -> None:
    waits = {"joined": [5] * 2, "done": False, "line": 5, "inside": IN_TORCH}
    run = hung(tmp_path, waits, {"joined": [5], "line": 9, "state": "disk-sleep"})
    assert run.culprit == 1
    assert "waits for the disk" in run.verdict.sentence


def test_without_collectives_the_stacks_tell(tmp_path: Path) -> None:
    """As of gloo by a torch before 2.13."""
    run = hung(tmp_path, {"joined": [5], "line": 5, "inside": IN_TORCH}, {"joined": [5], "line": 9})
    for rank in run.ranks:
        (rank.folder / wire.COLLECTIVES).unlink()
    run = Run.from_folder(tmp_path)
    assert run.culprit == 1
    assert "never came to what rank 0 waits for at line 5" in run.verdict.sentence


def test_nccls_watchdog_names_the_collective_and_the_look_the_rank(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_rank(tmp_path, 0, exitcode=-6, signal="SIGABRT")
    log = tmp_path / wire.LOGS / "x" / "attempt_0" / "0"
    log.mkdir(parents=True)
    (log / "stderr.log").write_text(WATCHDOG)
    write_rank(tmp_path, 1, **ENDED)
    write_look(tmp_path, 1, [5] * 11, line=9)
    run = Run.from_folder(tmp_path)
    assert (run.culprit, run.verdict.kind) == (1, "never_joined")
    assert "Rank 1 never joined allreduce #12" in run.verdict.sentence
    assert run.ranks[0].words == "gave up waiting: a consequence"


def test_a_rank_of_which_nothing_is_known_is_not_blamed(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_rank(tmp_path, 0, {"type": "RuntimeError", "message": GAVE_UP})
    write_rank(tmp_path, 1, **ENDED)
    assert Run.from_folder(tmp_path).culprit is None


def test_a_timeout_in_the_middle_of_a_step_blames_nobody(tmp_path: Path) -> None:
    """For a moment one rank always waits for another."""
    moment: dict[str, Any] = {"why": "timeout", "silent_s": 0.2}
    waits = {"joined": [5] * 3, "done": False, "line": 5, "inside": IN_TORCH}
    hung(tmp_path, {**waits, **moment}, {"joined": [5] * 2, "line": 9, **moment})
    wire.write_record(tmp_path / wire.END, {"reason": "timeout", "notes": []})
    for rank in (0, 1):
        path = wire.rank_folder(tmp_path, 0, rank) / wire.COLLECTIVES
        record = wire.read_record(path) or {}
        for entry in record["entries"]:
            entry["at_ns"] = 10**9
        wire.write_record(path, record)
    run = Run.from_folder(tmp_path)
    assert (run.state, run.culprit, run.verdict.kind) == ("timed_out", None, "timed_out")
