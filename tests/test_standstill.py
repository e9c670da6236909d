"""Who holds a job up, from recorded evidence alone: collectives, stacks, states, and the last words of NCCL's watchdog."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from test_records import GAVE_UP, write_rank, write_run

from ddpkit import Run, wire

ENDED = {"exitcode": -15, "signal": "SIGTERM", "told": "SIGTERM", "told_ns": 9 * 10**9}
WATCHDOG = (
    "[rank0]:[E1121 10:00:00.000 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600029 milliseconds "
    "before timing out.\n"
    "[rank0]:[E1121 10:00:00.000 ProcessGroupNCCL.cpp:1785] last enqueued work: {seq}, last completed work: 11\n"
)

Call = tuple[str, int] | tuple[str, int, list[int]]


def evidence(
    folder: Path,
    rank: int,
    calls: Sequence[Call],
    waits: bool,
    line: int = 0,
    state: str = "sleeping",
    busy: float = 0.0,
    gpu_busy: float | None = None,
    source: str = "",
) -> None:
    """Write down what a look found: the rank's collectives as (operation, line, size), and its stack at `line`."""
    own = wire.rank_folder(folder, 0, rank)
    entries = [
        {
            "seq": number,
            "op": call[0],
            "p2p": False,
            "group": "0",
            "group_name": "default_pg",
            "ranks": [],
            "sizes": [call[2] if len(call) > 2 else [4]],
            "dtypes": ["Float"],
            "at_ns": number,
            "done": not (waits and number == len(calls)),
            "where": {"file": "/t.py", "line": call[1], "function": "f", "source": f"x{call[1]}()", "own": True},
        }
        for number, call in enumerate(calls, 1)
    ]
    wire.write_record(own / wire.COLLECTIVES, {"at_ns": 1, "enqueued": {}, "completed": {}, "entries": entries})
    wire.write_record(
        own / wire.LOOK,
        {"at_ns": 1, "why": "stall", "state": state, "busy": busy, "silent_s": 9.0, "rss_mib": 1.0, "workers": []}
        | {"gpu_busy": gpu_busy},
    )
    torch = '  File "/lib/site-packages/torch/distributed/distributed_c10d.py", line 3 in all_reduce\n'
    stack = (
        f'Stack (most recent call first):\n{torch if waits else ""}  File "/t.py", line {line or calls[-1][1]} in f\n'
    )
    (own / wire.STACK).write_text(f"{stack}    {source}\n" if source else stack)


def hung(folder: Path, *ranks: dict[str, Any]) -> Run:
    """A run that was ended at a stall, with this evidence on its ranks."""
    write_run(folder, nproc=len(ranks))
    spec = wire.read_record(folder / wire.JOB) or {}
    wire.write_record(folder / wire.JOB, {**spec, "stall_s": 10.0})
    wire.write_record(folder / wire.END, {"reason": "stall", "notes": []})
    for number, found in enumerate(ranks):
        write_rank(folder, number, **ENDED)
        evidence(folder, number, **found)
    return Run.from_folder(folder)


def test_the_rank_that_never_joined_is_named_with_where_it_is(tmp_path: Path) -> None:
    step = [("all_reduce", 5)]
    run = hung(
        tmp_path, {"calls": step * 3, "waits": True}, {"calls": step * 2, "waits": False, "line": 9, "busy": 0.9}
    )
    assert (run.state, run.culprit, run.verdict.kind) == ("hung", 1, "never_joined")
    assert run.verdict.sentence.startswith("Rank 1 never joined all_reduce #3 (line 5: x5()); it computes at line 9")


def test_a_wait_for_a_rank_that_waits_itself_ends_at_the_one_that_does_not(tmp_path: Path) -> None:
    step: list[Call] = [("all_reduce", 5)]
    run = hung(
        tmp_path,
        {"calls": step * 3, "waits": True},
        {"calls": step * 3, "waits": True},
        {"calls": step * 2, "waits": False, "line": 9, "state": "stopped"},
    )
    assert (run.culprit, run.verdict.kind) == (2, "stopped_process")


def test_two_ranks_in_different_collectives_blame_nobody(tmp_path: Path) -> None:
    run = hung(tmp_path, {"calls": [("all_reduce", 5)], "waits": True}, {"calls": [("broadcast", 7)], "waits": True})
    assert (run.culprit, run.verdict.kind) == (None, "mismatch")
    assert "cannot be told" in run.verdict.sentence


def test_the_few_against_the_many(tmp_path: Path) -> None:
    many: dict[str, Any] = {"calls": [("all_reduce", 5)], "waits": True}
    run = hung(tmp_path, many, {"calls": [("all_reduce", 5, [1000])], "waits": True}, many)
    assert (run.culprit, run.verdict.kind) == (1, "mismatch")
    assert "[1000]" in run.verdict.sentence and "the other ranks agree" in run.verdict.sentence


def test_habit_tells_which_of_two_skipped(tmp_path: Path) -> None:
    step: list[Call] = [("all_reduce", 5), ("broadcast", 7)]
    run = hung(tmp_path, {"calls": [*step * 3, step[0]], "waits": True}, {"calls": [*step * 3, step[1]], "waits": True})
    assert (run.culprit, run.verdict.kind) == (1, "mismatch")


def test_a_silent_mispairing_is_found_by_the_lines(tmp_path: Path) -> None:
    """Rank 1 made one more all_reduce of the same size, in step 3; two steps later rank 0 has none to pair with."""
    usual: list[Call] = [("all_reduce", 5)]
    run = hung(
        tmp_path,
        {"calls": usual * 5, "waits": False, "line": 12},
        {"calls": [*usual * 3, ("all_reduce", 8), *usual * 2], "waits": True},
    )
    assert (run.culprit, run.verdict.kind) == (1, "mismatch")
    assert "line 8: x8()" in run.verdict.sentence


def test_ranks_may_join_from_different_lines_on_purpose(tmp_path: Path) -> None:
    run = hung(
        tmp_path,
        {"calls": [("all_reduce", 5), ("broadcast", 7)] * 3 + [("all_reduce", 5)], "waits": True},
        {"calls": [("all_reduce", 5), ("broadcast", 8)] * 3, "waits": False, "line": 11},
    )
    assert (run.culprit, run.verdict.kind) == (1, "never_joined")


def test_nobody_is_blamed_for_honest_work(tmp_path: Path) -> None:
    step: list[Call] = [("all_reduce", 5)]
    run = hung(
        tmp_path,
        {"calls": step * 3, "waits": False, "line": 8, "busy": 1.0},
        {"calls": step * 3, "waits": False, "line": 9, "busy": 1.0},
    )
    assert (run.culprit, run.verdict.kind) == (None, "busy")
    assert "No rank waits for another" in run.verdict.sentence


def test_a_long_backward_is_no_wait(tmp_path: Path) -> None:
    step: list[Call] = [("all_reduce", 5)]
    run = hung(tmp_path, {"calls": step * 3, "waits": False, "busy": 1.0}, {"calls": step * 4, "waits": True})
    backward = '  File "/lib/site-packages/torch/autograd/graph.py", line 9 in _engine_run_backward\n'
    stack = run.ranks[0].folder / wire.STACK
    stack.write_text(stack.read_text().replace('  File "/t.py"', f'{backward}  File "/t.py"', 1))
    run = Run.from_folder(tmp_path)
    assert (run.culprit, run.verdict.kind) == (0, "never_joined")
    assert "it computes at line 5" in run.verdict.sentence


def test_a_gpu_that_computes_is_honest_work_unless_a_collective_is_open(tmp_path: Path) -> None:
    step: list[Call] = [("all_reduce", 5)]
    works: dict[str, Any] = {"calls": step * 3, "waits": False, "line": 8, "gpu_busy": 1.0}
    assert hung(tmp_path / "a", works, {**works, "line": 9}).verdict.kind == "busy"
    # On NCCL the stack is at a look at a value, and the GPU spins in the collective.
    late = {"calls": step * 4, "waits": False, "line": 8, "source": "total += loss.item()", "gpu_busy": 1.0}
    run = hung(tmp_path / "b", late, {**works, "gpu_busy": 0.0})
    opened = wire.rank_folder(tmp_path / "b", 0, 0) / wire.COLLECTIVES
    record = wire.read_record(opened) or {}
    record["entries"][-1]["done"] = False
    wire.write_record(opened, record)
    run = Run.from_folder(tmp_path / "b")
    assert (run.culprit, run.verdict.kind) == (1, "never_joined")


def test_without_collectives_the_stacks_tell(tmp_path: Path) -> None:
    run = hung(
        tmp_path,
        {"calls": [("all_reduce", 5)], "waits": True},
        {"calls": [("all_reduce", 5)], "waits": False, "line": 9},
    )
    for rank in run.ranks:
        (rank.folder / wire.COLLECTIVES).unlink()
    run = Run.from_folder(tmp_path)
    assert run.culprit == 1
    assert "never joined what rank 0 waits for at line 5" in run.verdict.sentence


def test_nccls_watchdog_names_the_collective_and_the_look_the_rank(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_rank(tmp_path, 0, exitcode=-6, signal="SIGABRT")
    log = tmp_path / wire.LOGS / "x" / "attempt_0" / "0"
    log.mkdir(parents=True)
    (log / "stderr.log").write_text(WATCHDOG.format(seq=12, op="ALLREDUCE"))
    write_rank(tmp_path, 1, **ENDED)
    evidence(tmp_path, 1, [("all_reduce", 5)] * 11, waits=False, line=9)
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
    step: list[Call] = [("all_reduce", 5)]
    run = hung(tmp_path, {"calls": step * 3, "waits": True}, {"calls": step * 2, "waits": False, "line": 9})
    wire.write_record(tmp_path / wire.END, {"reason": "timeout", "notes": []})
    for rank in run.ranks:
        look = wire.read_record(rank.folder / wire.LOOK) or {}
        wire.write_record(rank.folder / wire.LOOK, {**look, "why": "timeout", "silent_s": 0.2})
    run = Run.from_folder(tmp_path)
    assert (run.state, run.culprit, run.verdict.kind) == ("timed_out", None, "timed_out")


def test_a_monitored_barrier_names_the_missing_ranks_itself(tmp_path: Path) -> None:
    write_run(tmp_path, nproc=3)
    message = "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 2000 ms"
    write_rank(tmp_path, 0, {"type": "RuntimeError", "message": message})
    for number in (1, 2):
        write_rank(tmp_path, number, **ENDED)
    run = Run.from_folder(tmp_path)
    assert run.culprit == (1, 2)
    assert run.verdict.sentence.startswith("Ranks 1 and 2 never came to a monitored barrier")
