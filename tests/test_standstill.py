"""Who holds a job up, from recorded evidence alone: collectives, stacks, states, and the last words of NCCL's watchdog."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_records import GAVE_UP, PEER_LOST, write_rank, write_run

from ddpkit import Run
from ddpkit.runfolder import wire
from ddpkit.verdict.culprit import judge
from ddpkit.verdict.endings import Ending

ENDED = {"exitcode": -15, "signal": "SIGTERM", "told": "SIGTERM", "told_ns": 9 * 10**9}
WATCHDOG = (
    "[rank0]:[E1121 10:00:00.000 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600029 milliseconds "
    "before timing out.\n"
    "[rank0]:[E1121 10:00:00.000 ProcessGroupNCCL.cpp:1785] last enqueued work: {seq}, last completed work: 11\n"
)

Call = tuple[str, int] | tuple[str, int, list[int]]

# Line 2 is the loop around the one in line 4; line 30 stands under an `if` in it, line 31 does not.
LOOPS = {30: ["/t.py:2"], 31: ["/t.py:2"]}


def frame(line: int) -> dict[str, Any]:
    """A line of the user's, as a record."""
    return {"file": "/t.py", "line": line, "function": "f", "source": f"x{line}()", "own": True}


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
    for_some: int = 0,
    peer: int | None = None,
    anew: int = 0,
    within: Sequence[int] = (),
    last_within: Sequence[int] = (),
    groups: Sequence[Sequence[int]] = (),
    exchanged: Sequence[tuple[int, str, int, int | None] | tuple[int, str, int, int | None, int]] = (),
    freed: Sequence[int] = (),
    keys_set: Sequence[str] = (),
    awaited: Sequence[str] = (),
    locked_by: int | None = None,
    polls: bool = False,
) -> None:
    """Write down what a look found: the rank's collectives as (operation, line, size), and its stack at `line`.

    The line `for_some` stands under an `if` about the rank; lines below 10 stand in a loop, and all in `LOOPS`; `peer` is
    the rank that a `recv` waits for. The last `anew` collectives came after the group was set up anew. The ranks of the
    group are `within`, and of that of the last collective alone `last_within`; none: all ranks. `groups` are
    the groups that the rank is in; `exchanged` are sends and receives as (after how many collectives, operation, line,
    peer, None for whichever sends, and a tag, if any), of which the program has let go of the handles of those at the
    places `freed`. `keys_set` of a store the rank has set, `awaited` it waits for; `locked_by` and `polls` are those of
    the look.
    """
    own = wire.rank_folder(folder, 0, rank)
    group_of = [last_within if last_within and number == len(calls) else within for number in range(1, len(calls) + 1)]
    entries = [
        {
            "seq": group_of[:number].count(group) if number <= len(calls) - anew else number - len(calls) + anew,
            "op": call[0],
            "p2p": False,
            "group": "".join(map(str, group)) or "0",
            "group_name": "mesh" if group else "default_pg",
            "ranks": list(group),
            "sizes": [call[2] if len(call) > 2 else [4]],
            "dtypes": ["Float"],
            "at_ns": number,
            "done": not (waits and number == len(calls)),
            "where": frame(call[1]),
            "only_if": "if rank == 1" if call[1] == for_some else "",
            "loops": LOOPS.get(call[1], ["/t.py:4", "/t.py:2"] if call[1] < 10 else []),
            "every_turn": [] if call[1] == 30 else LOOPS.get(call[1], []),
            "to_the_end": {6: ["/t.py:4", "/t.py:2"], 7: ["/t.py:4"]}.get(call[1], []),
        }
        for number, (call, group) in enumerate(zip(calls, group_of, strict=True), 1)
    ]
    exchanges = [
        {"at_ns": after + (1 + number) / 100, "op": op, "peer": with_rank, "where": frame(at), "tag": sum(tag)}
        | {"freed": number in freed}
        for number, (after, op, at, with_rank, *tag) in enumerate(exchanged)
    ]
    keyed = [{"at_ns": 1, "op": "set", "keys": [key], "where": frame(6)} for key in keys_set]
    of_store = {"keyed": keyed, "awaited": awaited}
    found = {"entries": entries, "groups": groups, "exchanged": exchanges, **of_store}
    wire.write_record(own / wire.COLLECTIVES, {"at_ns": 1, "enqueued": {}, "completed": {}, **found})
    wire.write_record(
        own / wire.LOOK,
        {"at_ns": 1, "why": "stall", "state": state, "busy": busy, "silent_s": 9.0, "rss_mib": 1.0, "workers": []}
        | {"gpu_busy": gpu_busy, "peer": peer, "locked_by": locked_by, "polls": polls},
    )
    inside = "all_reduce" if peer is None else "recv"
    torch = f'  File "/lib/site-packages/torch/distributed/distributed_c10d.py", line 3 in {inside}\n'
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


@pytest.mark.parametrize(
    ("holders", "culprit", "sentence"),
    [
        ([None, 2, None], 2, "Rank 1 waits for the lock on a file at line 9 of t.py, which rank 2 holds; it sits at"),
        ([None, 2, 0], 0, "Rank 2 waits for the lock on a file at line 9 of t.py, which rank 0 holds; it waits in"),
        ([None, 2, 1], (1, 2), "Ranks 1 and 2 never joined"),
        ([None, None, None], (1, 2), "Ranks 1 and 2 never joined"),
    ],
)
def test_who_holds_the_lock_for_which_others_wait_is_at_fault(
    tmp_path: Path, holders: list[int | None], culprit: object, sentence: str
) -> None:
    step = [("all_reduce", 5)]
    idle = {"calls": step * 2, "waits": False, "line": 9}
    ranks = [{**(idle if n else {"calls": step * 3, "waits": True}), "locked_by": h} for n, h in enumerate(holders)]
    run = hung(tmp_path, *ranks)
    assert (run.culprit, run.verdict.kind) == (culprit, "never_joined")
    assert sentence in run.verdict.sentence


@pytest.mark.parametrize(
    ("lines", "culprit"), [((9, 9, 9), 3), ((9, 9, 8), (0, 1, 2)), ((9, 9, None), (0, 1)), ((9, 0, 0), (0, 1, 2))]
)
def test_who_goes_on_without_what_most_look_for_at_one_line_is_at_fault(
    tmp_path: Path, lines: tuple[int | None, ...], culprit: object
) -> None:
    """A line of 0: the rank sits there and looks at nothing; None: it waits in the collective."""
    step = [("all_reduce", 5)]
    waits: dict[str, Any] = {"calls": step * 3, "waits": True}
    looks = ({"calls": step * 2, "waits": False, "line": line or 9, "polls": bool(line)} for line in lines)
    ranks = [waits if line is None else look for line, look in zip(lines, looks, strict=True)]
    run = hung(tmp_path, *ranks, waits)
    assert (run.culprit, run.verdict.kind) == (culprit, "never_joined")


def test_what_a_rank_meets_as_the_others_are_ended_is_no_part_of_the_standstill(tmp_path: Path) -> None:
    """Rank 1 was ended first; ranks 0 and 2 lost it before their own end came, and wrote down that they wait no more."""
    step: list[Call] = [("all_reduce", 5)]
    waits: dict[str, Any] = {"calls": step * 3, "waits": True}
    hung(tmp_path, waits, {"calls": step * 2, "waits": False, "line": 9, "busy": 0.9}, waits)
    lost = {
        "type": "RuntimeError",
        "message": "gloo/transport/tcp/pair.cc:553] Connection closed by peer",
        "at_ns": 9_500,
    }
    for rank, told_ns in enumerate((10_000, 9_000, 0)):
        own = wire.rank_folder(tmp_path, 0, rank)
        signal = {"told": "SIGTERM", "told_ns": told_ns} if told_ns else {}
        if rank == 1:
            write_rank(tmp_path, rank, exitcode=-15, signal="SIGTERM", **signal)
            continue
        write_rank(tmp_path, rank, lost, exitcode=1, **signal)
        (own / wire.COLLECTIVES).rename(own / wire.COLLECTIVES_ASKED)
        record = wire.read_record(own / wire.COLLECTIVES_ASKED) or {}
        over = {**record, "entries": [{**entry, "done": True} for entry in record["entries"]], "requested": [1]}
        wire.write_record(own / wire.COLLECTIVES, over)
    run = Run.from_folder(tmp_path)
    assert (run.state, run.culprit, run.verdict.kind) == ("hung", 1, "never_joined")
    assert "it computes at line 9" in run.verdict.sentence
    assert "Ranks 0 and 2 wait there" in run.verdict.sentence


def test_a_rank_that_has_set_up_its_group_anew_has_left_those_in_the_one_before(tmp_path: Path) -> None:
    """The numbers start again there, and other sizes under the same number are no mismatch."""
    step: list[Call] = [("all_reduce", 5)]
    ahead: list[Call] = [*step * 3, ("all_reduce", 5, [8])]
    run = hung(
        tmp_path,
        {"calls": step * 4, "waits": True},
        {"calls": ahead, "waits": True, "anew": 1},
        {"calls": step * 4, "waits": True},
    )
    assert (run.culprit, run.verdict.kind) == (1, "never_joined")
    said = "Rank 1 never joined all_reduce #4 (line 5: x5()); it waits in all_reduce #1 after init_process_group was called again"
    assert run.verdict.sentence.startswith(said)


def test_a_wait_for_a_rank_that_waits_itself_ends_at_the_one_that_does_not(tmp_path: Path) -> None:
    step: list[Call] = [("all_reduce", 5)]
    run = hung(
        tmp_path,
        {"calls": step * 3, "waits": True},
        {"calls": step * 3, "waits": True},
        {"calls": step * 2, "waits": False, "line": 9, "state": "stopped"},
    )
    assert (run.culprit, run.verdict.kind) == (2, "stopped_process")


def test_who_waits_for_the_disk_does_not_just_sit(tmp_path: Path) -> None:
    step: list[Call] = [("all_reduce", 7)]
    run = hung(
        tmp_path,
        {"calls": step * 2, "waits": True},
        {"calls": step, "waits": False, "line": 9, "state": "disk-sleep"},
    )
    assert run.culprit == 1 and "it waits for the disk at line 9" in run.verdict.sentence
    assert "rank 1: waits for the disk" in str(run)


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
        {"calls": [*usual * 3, ("all_reduce", 8), *usual * 2], "waits": True, "for_some": 8},
    )
    assert (run.culprit, run.verdict.kind) == (1, "mismatch")
    assert "line 8: x8()" in run.verdict.sentence


def test_an_unnoticed_parting_before_a_mismatch_names_who_left(tmp_path: Path) -> None:
    """Rank 0 evaluates: its broadcast at line 8 pairs with rank 1's of the next step, and only after that do they differ."""
    step: list[Call] = [("broadcast", 5), ("all_reduce", 7)]
    run = hung(
        tmp_path,
        {"calls": [*step * 3, ("broadcast", 8), ("broadcast", 5)], "waits": True, "for_some": 8},
        {"calls": step * 4, "waits": True},
    )
    assert (run.culprit, run.verdict.kind) == (0, "mismatch")
    assert "#7: rank 0 came to it from line 8" in run.verdict.sentence


def test_a_call_made_for_the_first_time_is_one_too_many_only_where_it_is_for_some_ranks(tmp_path: Path) -> None:
    """Rank 0 evaluates for the first time: by an `if` about the rank, or because rank 1 skipped that step."""
    step: list[Call] = [("all_reduce", 5)]
    new: dict[str, Any] = {"calls": [*step * 3, ("reduce", 9)], "waits": True}
    usual = {"calls": step * 4, "waits": True}
    assert hung(tmp_path / "a", {**new, "for_some": 9}, usual).culprit == 0
    assert hung(tmp_path / "b", new, usual).culprit is None
    # Under `else` stands the other rank's call then.
    assert hung(tmp_path / "c", {**new, "for_some": 9}, {**usual, "for_some": 5}).culprit is None


def test_who_has_left_the_loop_in_which_the_other_goes_on_left_the_common_way(tmp_path: Path) -> None:
    step: list[Call] = [("all_reduce", 5)]
    after = {"calls": [*step * 3, ("barrier", 12)], "waits": True}
    run = hung(tmp_path, {"calls": step * 4, "waits": True}, after)
    assert run.culprit == 1 and "the loop that is left there goes on elsewhere" in run.verdict.sentence


@pytest.mark.parametrize(
    ("waits_in", "sentence"), [(6, "Rank 1 has fewer"), (7, "left the common way"), (5, "left the common way")]
)
def test_who_has_come_to_the_end_of_a_loop_before_the_others_has_fewer_turns(
    tmp_path: Path, waits_in: int, sentence: str
) -> None:
    turn = ("all_reduce", waits_in)
    on, over = {"calls": [turn] * 4, "waits": True}, {"calls": [*[turn] * 3, ("barrier", 12)], "waits": True}
    run = hung(tmp_path / "one", on, over, on)
    assert run.culprit == 1 and sentence in run.verdict.sentence
    assert run.diagnosis.name == ("uneven_inputs" if waits_in == 6 else "collective_mismatch")
    if waits_in == 6:
        run = hung(tmp_path / "two", over, on, over)
        assert run.culprit == 1 and "Rank 1 has more turns of the loop in line 4" in run.verdict.sentence


def test_whose_other_collective_is_a_threads_may_still_be_in_the_loop(tmp_path: Path) -> None:
    on = {"calls": [("all_reduce", 6)] * 4, "waits": True}
    run = hung(tmp_path, on, {"calls": [*[("all_reduce", 6)] * 3, ("all_gather", 12)], "waits": True}, on)
    record = run.ranks[1].folder / wire.COLLECTIVES
    found = wire.read_record(record) or {}
    found["entries"][-1]["in_thread"] = True
    wire.write_record(record, found)
    run = Run.from_folder(tmp_path)
    assert (run.culprit, run.diagnosis.name) == (1, "collective_mismatch")
    assert "rank 1 joined all_gather of [4] Float in a thread of its own (line 12" in run.verdict.sentence


def test_who_may_be_a_turn_of_the_outer_loop_behind_has_not_left_the_loop(tmp_path: Path) -> None:
    steps = [("all_reduce", 5)] * 3
    for line, culprit in ((30, None), (31, 1)):
        other = {"calls": [*steps, ("all_reduce", line, [1])], "waits": True}
        run = hung(tmp_path / str(line), {"calls": [*steps, ("all_reduce", 5)], "waits": True}, other)
        assert run.culprit == culprit, run.verdict.sentence


def test_ranks_of_another_group_tell_which_of_two_left_the_common_way(tmp_path: Path) -> None:
    steps = [("all_reduce", 5)] * 3
    here, there = [0, 2], [1, 3]
    on, extra = [*steps, ("all_reduce", 5)], [*steps, ("all_reduce", 7, [1])]
    run = hung(
        tmp_path / "one",
        {"calls": extra, "waits": True, "within": here},
        {"calls": [*on, ("barrier", 12)], "waits": True, "within": there},
        {"calls": on, "waits": True, "within": here},
        {"calls": [*on, ("barrier", 12)], "waits": True, "within": there},
    )
    assert (run.culprit, run.diagnosis.name) == (0, "collective_mismatch")
    assert run.verdict.sentence.count("most ranks of the job did as rank 2") == 1
    # Those of the other group came another way: they know nothing of it.
    apart = {"calls": [("all_reduce", 9)] * 4, "waits": True, "within": there}
    pair = [{"calls": way, "waits": True, "within": here} for way in (extra, on)]
    assert hung(tmp_path / "two", pair[0], apart, pair[1], apart).culprit is None


def test_one_that_waits_in_its_own_group_first_is_outvoted_by_ranks_with_groups_like_its(tmp_path: Path) -> None:
    world = {"calls": [("all_reduce", 5), ("all_reduce", 6)], "waits": True}
    row = {**world, "calls": [("all_reduce", 5), ("all_reduce", 7)], "last_within": [0, 1]}
    ranks = [{**world}, row, {**world}, {**world}]
    run = hung(tmp_path / "alike", *(rank | {"groups": [[0, 1, 2, 3], [0, 1]]} for rank in ranks))
    assert (run.culprit, run.diagnosis.name) == (1, "skipped_collective")
    assert "Rank 1 never joined all_reduce #2" in run.verdict.sentence
    assert "most ranks came to another one" in run.verdict.sentence
    for number, rank in enumerate(ranks):
        rank["groups"] = [[0, 1, 2, 3], [0, 1]] if number < 2 else [[0, 1, 2, 3]]
    assert hung(tmp_path / "unlike", *ranks).culprit is None


def test_a_receive_that_comes_after_the_loop_blames_neither_end(tmp_path: Path) -> None:
    """Rank 0 waits to receive after three turns; that rank 1 has forgotten to send is as likely as one receive too many."""
    step: list[Call] = [("all_reduce", 5)]
    run = hung(
        tmp_path,
        {"calls": step * 3, "waits": True, "line": 20, "peer": 1, "exchanged": [(3, "recv", 20, 1)]},
        {"calls": [*step * 3, ("barrier", 30)], "waits": True},
        {"calls": [*step * 3, ("barrier", 30)], "waits": True},
    )
    assert (run.culprit, run.verdict.kind) == (None, "all_waiting")


def test_a_receive_more_than_in_the_turns_before_is_one_too_many(tmp_path: Path) -> None:
    sends = {"calls": [("barrier", 5)] * 4, "waits": True, "exchanged": [(turn, "send", 4, 0) for turn in range(4)]}
    receives = {"calls": [("barrier", 5)] * 3, "waits": True, "line": 20, "peer": 1}
    received = [(turn, "recv", 3, 1) for turn in range(4)]
    run = hung(tmp_path, {**receives, "exchanged": [*received, (3, "recv", 20, 1)]}, sends, sends)
    assert (run.culprit, run.verdict.kind) == (0, "unmatched")
    assert "from recv with rank 1 (line 3: x3()) it came to recv with rank 1 (line 20" in run.verdict.sentence


def test_a_send_that_is_new_may_be_what_its_peer_has_left_out(tmp_path: Path) -> None:
    turns = range(4)
    student = [each for turn in turns for each in ((0, "send", 3, 1), (0, "recv", 4, 1))]
    teacher = [each for turn in turns for each in ((0, "recv", 6, 0), (0, "send", 7, 0))]
    sends = {
        "calls": [],
        "waits": True,
        "line": 20,
        "peer": 1,
        "exchanged": [*student, (0, "send", 20, 1)],
    }
    receives = {"calls": [], "waits": True, "line": 6, "peer": 0, "exchanged": [*teacher, (0, "recv", 6, 0)]}
    run = hung(tmp_path, sends, receives)
    assert run.culprit is None and "cannot be told" in run.verdict.sentence


def test_who_swaps_alone_where_all_have_swapped_before_is_out_of_step(tmp_path: Path) -> None:
    step: list[Call] = [("all_reduce", 5)]
    pairs = {0: 1, 1: 0, 2: 3, 3: 2}

    def rank(number: int, rounds: Sequence[int]) -> dict[str, Any]:
        lines = [("send", 2), ("recv", 3)] if number % 2 == 0 else [("recv", 6), ("send", 7)]
        swaps = [(r, op, line, pairs[number]) for r in rounds for op, line in lines]
        alone = len(rounds) > 1
        waits = {"line": 6, "peer": pairs[number], "exchanged": swaps[:-1]} if alone else {"exchanged": swaps}
        return {"calls": step * (3 if alone else 4), "waits": True, **waits}

    run = hung(tmp_path / "once", rank(0, [1]), rank(1, [1, 3]), rank(2, [1]), rank(3, [1]))
    assert run.culprit == 1, run.verdict.sentence
    # Where nobody has swapped before, the other of the pair may have left it out.
    run = hung(tmp_path / "first", rank(0, []), rank(1, [3, 3]), rank(2, []), rank(3, []))
    assert run.culprit is None, run.verdict.sentence


def test_who_has_drawn_another_partner_than_all_is_told_by_the_round_before(tmp_path: Path) -> None:
    """Pairs that swap, the lower sends first; in the second round rank 2 takes rank 1, which has swapped with 0."""

    def swap(turn: int, number: int, other: int) -> list[tuple[int, str, int, int]]:
        return [(turn, op, 6, other) for op in (("send", "recv") if number < other else ("recv", "send"))]

    after: dict[str, Any] = {"calls": [("all_reduce", 8)] * 2, "waits": True, "within": [0, 1, 2, 3]}
    waits: dict[str, Any] = {"calls": [("all_reduce", 8)], "within": [0, 1, 2, 3], "waits": True, "line": 6}
    first = {n: swap(0, n, other) for n, other in enumerate([2, 3, 0, 1])}
    run = hung(
        tmp_path,
        {**after, "exchanged": first[0] + swap(1, 0, 1)},
        {**after, "exchanged": first[1] + swap(1, 1, 0)},
        {**waits, "peer": 1, "exchanged": first[2] + swap(1, 2, 1)[:1]},
        {**waits, "peer": 2, "exchanged": first[3] + swap(1, 3, 2)[:1]},
    )
    assert (run.culprit, run.verdict.kind) == (2, "unmatched")
    assert "it waits to exchange with rank 1, which has exchanged with rank 0" in run.verdict.sentence


def test_a_stage_with_a_role_of_its_own_is_not_out_of_step(tmp_path: Path) -> None:
    """Rank 0 of a pipeline sends four times, the last stage receives three times: either may have counted wrong."""
    sends = [(1, "send", 9, 1)] * 4
    middle = [(1, "recv", 9, 0), (1, "send", 10, 2)] * 3
    run = hung(
        tmp_path,
        {"calls": [("barrier", 5)], "waits": True, "line": 9, "peer": 1, "exchanged": sends},
        {"calls": [("barrier", 5), ("barrier", 30)], "waits": True, "exchanged": middle},
        {"calls": [("barrier", 5), ("barrier", 30)], "waits": True, "exchanged": [(1, "recv", 9, 1)] * 3},
    )
    assert run.culprit is None, run.verdict.sentence


def test_a_receive_waits_for_its_sender_and_not_for_who_stands_by(tmp_path: Path) -> None:
    step: list[Call] = [("all_reduce", 5)]
    waits: dict[str, Any] = {"calls": step, "waits": True, "line": 7}
    idle = {"calls": step, "waits": False, "line": 9}
    assert hung(tmp_path / "a", {**waits, "peer": 2}, idle, {**waits, "peer": 0}).culprit is None
    found = hung(tmp_path / "b", {**waits, "peer": 2}, idle, {**idle, "line": 11})
    assert found.culprit == 2 and "line 11" in found.verdict.sentence


def test_a_wait_in_torch_is_told_from_a_wait_for_a_process(tmp_path: Path) -> None:
    step: list[Call] = [("all_reduce", 5)]
    idle: dict[str, Any] = {"calls": step, "waits": False, "line": 9}
    found = hung(tmp_path / "a", {**idle, "line": 7, "source": "request.wait()"}, idle)
    assert found.culprit == 1
    below = '  File "/lib/python3.11/subprocess.py", line 3 in wait\n'
    found = hung(tmp_path / "b", {**idle, "line": 7, "source": "process.wait()"}, idle)
    stack = found.ranks[0].folder / wire.STACK
    stack.write_text(stack.read_text().replace('  File "/t.py"', f'{below}  File "/t.py"'))
    assert Run.from_folder(tmp_path / "b").culprit is None


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


def test_only_what_python_says_of_a_thread_is_taken_for_its_end(tmp_path: Path) -> None:
    died = "Exception in thread Thread-1:\nTraceback (most recent call last):\n  ...\nValueError: boom\n"
    for number, (said, told) in enumerate([("INFO:a\nINFO:b\nINFO:c\n", ""), (died, " has died of ValueError: boom.")]):
        step: list[Call] = [("all_reduce", 5)]
        folder = tmp_path / str(number)
        hung(folder, {"calls": step, "waits": True}, {"calls": [], "waits": False, "line": 8})
        log = folder / "logs" / "none_x" / "attempt_0" / "1" / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text(said)
        sentence = Run.from_folder(folder).verdict.sentence
        assert told in sentence and (" has died" in sentence) == bool(told), sentence


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


def test_a_monitored_barrier_that_others_never_came_to_may_be_the_one_too_many(tmp_path: Path) -> None:
    run = hung(
        tmp_path, {"calls": [("all_reduce", 5)], "waits": False}, {"calls": [("all_reduce", 5)] * 2, "waits": True}
    )
    message = "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms"
    failure = {"at_ns": 1, "type": "RuntimeError", "message": message, "chain": [], "traceback": "", "frames": []}
    wire.write_record(wire.rank_folder(tmp_path, 0, 0) / wire.FAILURE, {**failure, "where": None})
    run = Run.from_folder(tmp_path)
    assert (run.culprit, run.verdict.kind) == (None, "mismatch")
    assert "it waits in all_reduce #2 at line 5 of t.py. Which of them is wrong cannot be told" in run.verdict.sentence


@pytest.mark.parametrize(("joined", "waits", "culprit"), [(1, False, (1, 2)), (1, True, 1), (2, False, 1)])
def test_what_was_raised_where_another_was_waited_for_may_be_its_doing(
    tmp_path: Path, joined: int, waits: bool, culprit: object
) -> None:
    write_run(tmp_path, nproc=3)
    write_rank(tmp_path, 0, **ENDED)
    write_rank(tmp_path, 1, {"message": "one", "at_ns": 10**9})
    write_rank(tmp_path, 2, {"type": "TrainingError", "message": "other", "at_ns": 10**9 + 3_000_000})
    evidence(tmp_path, 1, [("all_reduce", 5)], waits=False)
    evidence(tmp_path, 2, [("all_reduce", 5)] * joined, waits=waits)
    assert Run.from_folder(tmp_path).culprit == culprit


def test_who_leaves_an_exchange_one_message_short_is_at_fault(tmp_path: Path) -> None:
    """A pipeline of three: all messages forward, and of the last stage one too few back."""
    back = {
        0: [("recv", 7, 1)] * 3,
        1: [("recv", 7, 2), ("send", 8, 0)] * 2 + [("recv", 7, 2)],
        2: [("send", 8, 1)] * 2,
    }
    forth = {0: [("send", 6, 1)] * 3, 1: [("recv", 5, 0), ("send", 6, 2)] * 3, 2: [("recv", 5, 1)] * 3}
    exchanged = {n: [(0, op, line, peer) for op, line, peer in forth[n] + back[n]] for n in range(3)}
    stage: dict[str, Any] = {"calls": [], "waits": True, "line": 7}
    last = {"calls": [("barrier", 9)], "waits": True, "within": [0, 1, 2], "exchanged": exchanged[2]}
    stages = [{**stage, "peer": n + 1, "exchanged": exchanged[n]} for n in (0, 1)]
    run = hung(tmp_path / "short", *stages, last)
    assert (run.culprit, run.verdict.kind) == (2, "unmatched")
    assert "rank 1 has sent it 3 messages, has 2 back, and waits for one more" in run.verdict.sentence
    # With as many back as were sent, rank 1 waits for one too many, for all that is known.
    stages[1]["exchanged"] = [*exchanged[1], (0, "send", 8, 0), (0, "recv", 7, 2)]
    assert "waits for one more" not in hung(tmp_path / "even", *stages, last).verdict.sentence


def test_who_has_made_fewer_process_groups_is_at_fault_where_all_make_one(tmp_path: Path) -> None:
    """gloo lets members alone make a group; the next one has another name for those who did not."""
    run = hung(tmp_path, *({"calls": [("barrier", 5)], "waits": True, "line": 9} for _ in range(3)))
    for rank, made in zip(run.ranks, (3, 2, 3), strict=True):
        stack = (rank.folder / wire.STACK).read_text()
        (rank.folder / wire.STACK).write_text(stack.replace("all_reduce", "_new_group_with_tag"))
        opened = wire.read_record(rank.folder / wire.COLLECTIVES) or {}
        entries = [{**entry, "done": True} for entry in opened["entries"]]
        wire.write_record(rank.folder / wire.COLLECTIVES, {**opened, "entries": entries, "groups_made": made})
    run = Run.from_folder(tmp_path)
    assert (run.culprit, run.verdict.kind) == (1, "never_joined")
    assert "Groups begun are 3 by rank 0, 2 by rank 1, 3 by rank 2. Rank 1 differs" in run.verdict.sentence


@pytest.mark.parametrize(
    ("told_s", "joined_s", "lost_s"), [(20, 9, None), (6.5, 6.2, 6.3)], ids=["a report", "a moment"]
)
def test_a_wait_that_was_given_up_before_it_was_told_names_who_came_late(
    tmp_path: Path, told_s: float, joined_s: float, lost_s: float | None
) -> None:
    """The other gave up after its 5 s; the late rank had come, or come and lost it, by the time that was told."""
    write_run(tmp_path)
    step: list[Call] = [("all_reduce", 5)]
    write_rank(tmp_path, 0, {"type": "RuntimeError", "message": GAVE_UP, "at_ns": int(told_s * 10**9)})
    if lost_s:
        write_rank(
            tmp_path, 1, {"type": "RuntimeError", "message": PEER_LOST.format(port=1), "at_ns": int(lost_s * 10**9)}
        )
    else:
        write_rank(tmp_path, 1, **ENDED)
    for rank, came_s in ((0, 1), (1, joined_s)):
        evidence(tmp_path, rank, step, waits=False, line=5 if rank == 0 else 9)
        record = wire.rank_folder(tmp_path, 0, rank) / wire.COLLECTIVES
        found = wire.read_record(record) or {}
        entries = [{**found["entries"][0], "at_ns": int(came_s * 10**9), "where": {**frame(3), "file": "t.py"}}]
        wire.write_record(record, {**found, "entries": entries})
    run = Run.from_folder(tmp_path)
    assert (run.culprit, run.verdict.kind) == (1, "straggler"), run


@pytest.mark.parametrize(
    ("by_0", "by_1", "wanted", "culprit"),
    [
        (["t0/p4", "t1/p4", "t2/p4"], ["t0/p7", "t1/p7"], "t2/p7", 1),
        (["p0", "p6"], ["p1", "p4", "p7"], "p3", 0),
        (["p0", "p3"], ["p1", "p4"], "p6", None),
        (["loss0", "loss1"], [], "loss2", None),
        (["to1/m0", "to1/m1"], ["to0/m0"], "to0/m1", None),
    ],
    ids=["its own in each round", "what goes round the ranks", "one too many asked for", "the next", "its own once"],
)
def test_whose_a_key_is_that_nobody_has_set_the_others_keys_tell(
    tmp_path: Path, by_0: list[str], by_1: list[str], wanted: str, culprit: int | None
) -> None:
    there: dict[str, Any] = {"calls": [("all_reduce", 5)], "waits": True, "within": [0, 1, 2]}
    reader = {"calls": [], "waits": True, "line": 7, "awaited": [wanted], "within": [0, 1, 2]}
    run = hung(tmp_path, {**there, "keys_set": by_0}, {**there, "keys_set": by_1}, reader)
    if culprit is None:
        assert "has not set it" not in run.verdict.sentence
    else:
        assert (run.culprit, run.verdict.kind) == (culprit, "no_key")


@pytest.mark.parametrize(("rounds", "culprit"), [(0, None), (1, 0)], ids=["in the first round", "after a round of all"])
def test_who_is_wrong_where_a_chain_may_be_a_ring_an_earlier_round_tells(
    tmp_path: Path, rounds: int, culprit: int | None
) -> None:
    """Rank 3 waits for an exchange with rank 0: who has one neighbour only may be the end of a chain."""
    ring = {n: [(n - 1) % 4, (n + 1) % 4] for n in range(4)}
    now = {**ring, 0: [1]}
    made = {
        n: [(turn, op, 6, peer) for turn in range(rounds) for peer in ring[n] for op in ("send", "recv")]
        + [(rounds, op, 6, peer) for peer in now[n] for op in ("send", "recv")]
        for n in range(4)
    }
    after = {"calls": [("all_reduce", 8)] * (rounds + 1), "waits": True, "within": [0, 1, 2, 3]}
    waits = {
        "calls": after["calls"][:rounds],
        "within": [0, 1, 2, 3] if rounds else [],
        "waits": True,
        "line": 6,
        "peer": 0,
    }
    run = hung(tmp_path, *({**after, "exchanged": made[n]} for n in range(3)), {**waits, "exchanged": made[3]})
    assert run.culprit == culprit
    assert "rank 3 waits for rank 0 at line 6" in run.verdict.sentence


def test_who_goes_on_while_two_wait_to_exchange_with_it_is_at_fault(tmp_path: Path) -> None:
    """The middle stage of a pipeline has one batch less than its neighbours."""
    stage: dict[str, Any] = {"calls": [], "waits": True, "line": 7, "peer": 1}
    middle = {"calls": [("all_reduce", 9)], "waits": True, "within": [0, 1, 2]}
    first, last = ({**stage, "exchanged": [(0, op, 6, 1)]} for op in ("send", "recv"))
    run = hung(tmp_path, first, {**middle, "exchanged": [(0, "recv", 5, 0), (0, "send", 6, 2)]}, last)
    assert (run.culprit, run.verdict.kind) == (1, "unmatched")
    assert "ranks 0 and 2 still wait to exchange with it" in run.verdict.sentence


def test_who_waits_to_exchange_with_two_that_do_not_is_at_fault(tmp_path: Path) -> None:
    """A ring of three, joined by a fourth."""
    barrier = {"calls": [("barrier", 9)], "waits": True, "within": [0, 1, 2, 3]}
    outside: dict[str, Any] = {"calls": [], "waits": False, "line": 7, "source": "work.wait()"}
    run = hung(tmp_path, barrier, barrier, barrier, outside)
    record = wire.rank_folder(tmp_path, 0, 3) / wire.COLLECTIVES
    wire.write_record(record, {**(wire.read_record(record) or {}), "requested": [0, 1]})
    run = Run.from_folder(tmp_path)
    assert (run.culprit, run.verdict.kind) == (3, "unmatched")


def test_who_has_one_exchange_less_than_in_every_round_before_is_at_fault(tmp_path: Path) -> None:
    rounds: list[Call] = [("barrier", 9)] * 3
    there: dict[str, Any] = {"calls": rounds, "waits": True, "within": [0, 1, 2]}
    drops = [(turn, "send", 6, 2) for turn in (0, 0, 1, 1, 2)]
    waits = {"calls": rounds[:2], "waits": True, "line": 5, "peer": 1, "within": [0, 1, 2]}
    receives = [(turn, "recv", 5, 1) for turn in (0, 0, 1, 1, 2, 2)]
    run = hung(tmp_path / "a", there, {**there, "exchanged": drops}, {**waits, "exchanged": receives})
    assert run.culprit == 1
    assert "waits for exchange 2 of 2 with it, as many as in every round before" in run.verdict.sentence
    # Where the other has one more than ever, it is not the one that left.
    more = [(turn, "send", 6, 2) for turn in (0, 0, 1, 1, 2, 2)]
    run = hung(
        tmp_path / "b", there, {**there, "exchanged": more}, {**waits, "exchanged": [*receives, (2, "recv", 5, 1)]}
    )
    assert "as many as in every round before" not in run.verdict.sentence


def test_who_takes_a_group_across_those_of_the_others_is_at_fault(tmp_path: Path) -> None:
    """Rows of a mesh are 0, 1 and 2, 3, its columns 0, 2 and 1, 3: rank 3 takes its column for its row, and meets rank 1's."""
    row: Call = ("all_reduce", 5)
    waits: dict[str, Any] = {"waits": True}
    first = {**waits, "calls": [row, ("all_reduce", 6)], "within": [0, 1], "last_within": [0, 2]}
    second = {**waits, "calls": [row, row], "within": [0, 1]}
    third = {**waits, "calls": [row], "within": [2, 3]}
    fourth = {**waits, "calls": [row, ("all_reduce", 6)], "within": [1, 3]}
    run = hung(tmp_path / "a", first, second, third, fourth)
    assert (run.culprit, run.verdict.kind) == (3, "mismatch"), run
    assert "in the group of ranks 1 and 3" in run.verdict.sentence
    # Where another rank comes to that line in several groups, a line says nothing of a group.
    both = {**first, "calls": [row, row]}
    assert hung(tmp_path / "b", both, second, third, fourth).culprit is None


def test_who_leaves_its_group_for_a_collective_of_all_is_at_fault(tmp_path: Path) -> None:
    """A rank gives up its trial by its own loss; the others of its group train on. Rank 0, a group of its own, is done."""
    own: Call = ("all_reduce", 5)
    done = {"waits": True, "calls": [("all_gather", 20)], "within": [0, 1, 2, 3], "groups": [[0, 1, 2, 3], [0]]}
    trains: dict[str, Any] = {
        "waits": True,
        "calls": [own, own, own],
        "within": [1, 2, 3],
        "groups": [[0, 1, 2, 3], [1, 2, 3]],
    }
    leaves = {**trains, "calls": [own, own, ("all_gather", 20)], "last_within": [0, 1, 2, 3]}
    run = hung(tmp_path / "a", done, trains, trains, leaves)
    assert run.culprit == 3, run
    assert "the rest of its group still waits in all_reduce #3" in run.verdict.sentence
    # Of a group of two, either may be the one: that it left the group does not tell.
    there, gone = ({**rank, "within": [1, 2]} for rank in (trains, leaves))
    run = hung(tmp_path / "b", {**done, "within": [0, 1, 2]}, there, {**gone, "last_within": [0, 1, 2]})
    assert "of its group" not in run.verdict.sentence


def test_who_goes_past_the_first_collective_of_its_group_is_at_fault(tmp_path: Path) -> None:
    """Ranks 0 and 2 lead a pair each, and rank 2 does not know: it has never met rank 0, for whom rank 1 waits."""
    leader: dict[str, Any] = {"waits": True, "calls": [("reduce", 11), ("all_reduce", 12)], "last_within": [0, 2]}
    leader |= {"within": [0, 1], "groups": [[0, 1, 2, 3], [0, 1], [0, 2]]}
    behind: dict[str, Any] = {"waits": True, "calls": [("reduce", 11), ("broadcast", 13)], "within": [0, 1]}
    ends: dict[str, Any] = {"waits": True, "calls": [*behind["calls"], ("barrier", 20)], "within": [2, 3]}
    ends |= {"last_within": [0, 1, 2, 3]}
    leads = {**ends, "groups": [[0, 1, 2, 3], [2, 3], [0, 2]]}
    run = hung(tmp_path / "a", leader, behind, leads, ends)
    assert (run.culprit, run.verdict.kind) == (2, "never_joined"), run
    # Where rank 0 had come to that line before, it may be the one that left.
    early = {**leader, "calls": [("barrier", 20), *leader["calls"]]}
    assert "of its group" not in hung(tmp_path / "b", early, behind, leads, ends).verdict.sentence
    # A second group of all ranks is none that one of them may not know of.
    metric: dict[str, Any] = {"waits": True, "calls": [("all_reduce", 8)], "within": [0, 1], "groups": [[0, 1]]}
    trains: dict[str, Any] = {"waits": True, "calls": [("all_reduce", 9)], "within": [0, 1], "groups": [[0, 1]]}
    assert hung(tmp_path / "c", {**metric, "last_within": [1, 0]}, trains).culprit is None


def test_who_lets_go_of_the_handle_of_what_another_waits_for_is_at_fault(tmp_path: Path) -> None:
    """The second message is lost; with its handle kept, nobody can tell."""
    took = [(0, "recv", 9, 0), (0, "recv", 9, 0)]
    waits: dict[str, Any] = {"waits": True, "calls": [], "line": 9, "peer": 0, "exchanged": took}
    began: dict[str, Any] = {"waits": True, "calls": [("all_reduce", 5)]}
    sent = [(0, "isend", 8, 1), (0, "isend", 8, 1)]
    run = hung(tmp_path / "a", {**began, "exchanged": sent, "freed": [1]}, waits)
    assert run.culprit == 0, run
    assert "let go of the handle of isend with rank 1 (line 8" in run.verdict.sentence
    assert "handle" not in hung(tmp_path / "b", {**began, "exchanged": sent, "freed": [0]}, waits).verdict.sentence
    # The first of two has come, and the other was never sent.
    assert "handle" not in hung(tmp_path / "c", {**began, "exchanged": sent[:1], "freed": [0]}, waits).verdict.sentence
    # It may wait for what it sent itself as well.
    swaps = [(0, "irecv", 9, 0), (0, "isend", 9, 0)]
    both = {**waits, "exchanged": swaps}
    answered = {**began, "exchanged": [(0, "isend", 8, 1), (0, "irecv", 8, 1)], "freed": [0, 1]}
    assert "handle" not in hung(tmp_path / "d", answered, both).verdict.sentence


@pytest.mark.parametrize(
    ("over_s", "kind"), [(3.0, "straggler"), (0, "never_joined"), (1.1, "never_joined"), (6.0, "never_joined")]
)
def test_who_came_after_a_wait_was_over_was_late_whatever_failed_then(tmp_path: Path, over_s: float, kind: str) -> None:
    """Rank 1 waited from 1 s on, came back, and lost its peer in the next call; rank 0 had come at 5.5 s, and sleeps."""
    write_run(tmp_path)
    write_rank(tmp_path, 0, **ENDED)
    write_rank(tmp_path, 1, {"type": "RuntimeError", "message": PEER_LOST.format(port=1), "at_ns": 9 * 10**9})
    evidence(tmp_path, 0, [("all_reduce", 5)], waits=False, line=9)
    evidence(tmp_path, 1, [("all_reduce", 5)] * 2, waits=True)
    for rank, came_s in ((0, [5.5]), (1, [1.0, 7.0])):
        record = wire.rank_folder(tmp_path, 0, rank) / wire.COLLECTIVES
        found = wire.read_record(record) or {}
        for entry, at_s in zip(found["entries"], came_s, strict=True):
            entry |= {"at_ns": int(at_s * 10**9), "over_ns": int(over_s * 10**9) if rank else 0, "done": at_s < 7}
        wire.write_record(record, found)
    run = Run.from_folder(tmp_path)
    assert (run.culprit, run.verdict.kind) == (0, kind), run


def test_who_comes_long_after_all_others_had_given_up_is_at_fault_though_they_have_not_ended(tmp_path: Path) -> None:
    """They caught the timeout and save first; the late rank finds the connection closed and fails."""

    def late(folder: Path, by_s: int, waits: bool = False, over_s: float = 0.0, **ended: Any) -> Run:
        write_run(folder, nproc=3)
        closed = "[/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
        still_there = {"exitcode": -15, "signal": "SIGTERM", "told": "SIGTERM", "told_ns": 10**11, "at_ns": 10**11}
        for rank in (0, 2):
            write_rank(folder, rank, **{**still_there, **ended})
            evidence(folder, rank, [("all_reduce", 5)] * 3, waits=waits, line=5 if waits else 9)
            own = wire.rank_folder(folder, 0, rank) / wire.COLLECTIVES
            found = wire.read_record(own) or {}
            found["entries"][-1]["over_ns"] = int(over_s * 10**9)
            wire.write_record(own, found)
        write_rank(folder, 1, {"type": "RuntimeError", "message": closed, "at_ns": 10**10, "where": frame(5)})
        evidence(folder, 1, [("all_reduce", 5)] * 3, waits=True)
        record = wire.rank_folder(folder, 0, 1) / wire.COLLECTIVES
        found = wire.read_record(record) or {}
        *before, last = found["entries"]
        wire.write_record(record, {**found, "entries": [*before, {**last, "at_ns": by_s * 10**9}]})
        return Run.from_folder(folder)

    run = late(tmp_path / "a", by_s=9)
    assert (run.culprit, run.verdict.kind) == (1, "straggler"), run
    assert "9 s after the others, who had given up waiting by then" in run.verdict.sentence
    assert late(tmp_path / "b", by_s=1).culprit is None
    assert late(tmp_path / "c", by_s=9, waits=True).culprit is None
    # Who leaves with exit code 0 having waited gave up; who leaves at once left early.
    left: dict[str, Any] = {"exitcode": 0, "signal": None, "told": None, "told_ns": 0}
    run = late(tmp_path / "d", by_s=9, at_ns=7 * 10**9, **left)
    assert (run.culprit, run.verdict.kind) == (1, "straggler"), run
    # It may take so long to leave that the late one is there before.
    slow = {**left, "at_ns": 11 * 10**9}
    run = late(tmp_path / "f", by_s=9, over_s=7, **slow)
    assert (run.culprit, run.verdict.kind) == (1, "straggler"), run
    assert late(tmp_path / "g", by_s=9, over_s=0.5, **slow).verdict.kind != "straggler"
    run = late(tmp_path / "e", by_s=9, at_ns=10**9, **left)
    assert (run.culprit, run.verdict.kind) == ((0, 2), "left_early"), run


def test_who_passes_on_less_than_came_to_it_unlike_in_every_round_before_is_at_fault(tmp_path: Path) -> None:
    """A stage of a pipeline drops a batch of which the round has one more than those before."""
    rounds: list[Call] = [("barrier", 9)] * 2

    def stages(folder: Path, came: int, passed: int, awaited: int) -> Run:
        there: dict[str, Any] = {"calls": rounds, "waits": True, "within": [0, 1, 2]}
        first = [(turn, "send", 6, 1) for turn in (0, 0, *[1] * came)]
        middle = [(turn, op, 6, peer) for turn in (0, 0) for op, peer in (("recv", 0), ("send", 2))]
        middle += [*[(1, "recv", 6, 0)] * came, *[(1, "send", 6, 2)] * passed]
        last = [(turn, "recv", 5, 1) for turn in (0, 0, *[1] * awaited)]
        waits = {"calls": rounds[:1], "waits": True, "line": 5, "peer": 1, "within": [0, 1, 2], "exchanged": last}
        return hung(folder, {**there, "exchanged": first}, {**there, "exchanged": middle}, waits)

    run = stages(tmp_path / "a", came=3, passed=2, awaited=3)
    assert run.culprit == 1, run
    assert "has passed on 2 of 3 messages that came to it from rank 0" in run.verdict.sentence
    # Where all was passed on, the one that waits for more may be wrong, or the first that sent so few.
    assert stages(tmp_path / "b", came=3, passed=3, awaited=4).culprit is None


def test_who_passes_on_each_message_but_one_is_at_fault(tmp_path: Path) -> None:
    """A stage of a pipeline leaves out an empty batch and goes on to the barrier."""

    def stages(folder: Path, middle: str, awaited: int) -> Run:
        there: dict[str, Any] = {"calls": [("barrier", 9)], "waits": True, "within": [0, 1, 2]}
        first = [(0, "send", 6, 1)] * middle.count("r")
        passed = [(0, "recv", 6, 0) if op == "r" else (0, "send", 7, 2) for op in middle]
        last = [(0, "recv", 5, 1)] * awaited
        waits = {"calls": [], "waits": True, "line": 5, "peer": 1, "within": [0, 1, 2], "exchanged": last}
        return hung(folder, {**there, "exchanged": first}, {**there, "exchanged": passed}, waits)

    run = stages(tmp_path / "a", "rsrrs", awaited=3)
    assert run.culprit == 1, run
    assert "rank 2 waits for one more of it, which has passed on 2 of 3 messages from rank 0" in run.verdict.sentence
    # Where it passes on less than half, or all together at the end, how many were meant is not told by that.
    assert stages(tmp_path / "b", "rsrr", awaited=2).culprit is None
    assert stages(tmp_path / "c", "rrrss", awaited=3).culprit is None


def exchanged_all_to_all(folder: Path, *rows: Sequence[int]) -> Run:
    """Ranks that brought so many rows to one all-to-all after another; gloo aborted the first in its last."""
    write_run(folder, nproc=len(rows))
    closed = "[/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
    for rank, brought in enumerate(rows):
        died = {"type": "RuntimeError", "message": closed, "at_ns": 98 + rank}
        how: dict[str, Any] = {}
        if rank == 0:
            died, how = {"type": "SIGABRT", "message": "Aborted", "at_ns": 97}, {"exitcode": -6, "signal": "SIGABRT"}
        write_rank(folder, rank, died | {"where": frame(5)}, **how)
        evidence(folder, rank, [("all_to_all", 5, [each, 8]) for each in brought], waits=True)
    log = folder / wire.LOGS / "x" / "attempt_0" / "0"
    log.mkdir(parents=True)
    (log / "stderr.log").write_text("op.preamble.length <= op.nbytes. 256 vs 192. Received data size doesn't match\n")
    return Run.from_folder(folder)


@pytest.mark.parametrize(
    ("rows", "culprit"),
    [
        pytest.param([[12, 12], [12, 12], [12, 16]], 2, id="always as many before"),
        pytest.param([[12], [12], [16]], 2, id="never before"),
        pytest.param([[12, 12], [14, 12], [12, 16]], None, id="others before"),
        pytest.param([[12, 12], [12, 14], [12, 16]], None, id="no two alike"),
        pytest.param([[12, 12], [12, 12], [12, 12]], None, id="all alike"),
    ],
)
def test_who_brought_more_than_ever_to_what_may_be_uneven(
    tmp_path: Path, rows: Sequence[Sequence[int]], culprit: int | None
) -> None:
    run = exchanged_all_to_all(tmp_path, *rows)
    assert (run.culprit, run.verdict.kind) == (culprit, "mismatch"), run


def test_who_has_another_root_than_most_is_at_fault_also_where_they_have_gone_on(tmp_path: Path) -> None:
    calls: list[Call] = [("barrier", 4), ("reduce", 5)]
    ahead = {"calls": [*calls, ("barrier", 6)], "waits": True}
    run = hung(tmp_path, {"calls": calls, "waits": True}, {"calls": calls, "waits": True}, ahead)
    for rank, root in zip(run.ranks, (0, 1, 0), strict=True):
        record = rank.folder / wire.COLLECTIVES
        found = wire.read_record(record) or {}
        entries = [{**entry, "root": root if entry["op"] == "reduce" else None} for entry in found["entries"]]
        wire.write_record(record, {**found, "entries": entries})
    run = Run.from_folder(tmp_path)
    assert (run.culprit, run.verdict.kind) == (1, "mismatch")
    assert "rank 1 joined reduce of [4] Float to rank 1" in run.verdict.sentence


def test_who_is_held_in_init_though_all_others_have_come_through_it_is_at_fault(tmp_path: Path) -> None:
    """One that sets DETAIL alone makes a second group there."""
    others: dict[str, Any] = {"calls": [("all_gather", 9)], "waits": True, "groups": [[0, 1, 2]]}
    run = hung(tmp_path, others, {"calls": [], "waits": False, "line": 3, "state": "sleeping"}, others)
    held = run.ranks[1].folder
    wire.write_record(held / wire.JOINING, {"at_ns": 1, "rank": -1, "master": "", "world_size": 2, "where": frame(3)})
    stack = '  File "/lib/site-packages/torch/distributed/distributed_c10d.py", line 3 in init_process_group\n'
    (held / wire.STACK).write_text(f'Stack (most recent call first):\n{stack}  File "/t.py", line 3 in f\n')
    run = Run.from_folder(tmp_path)
    assert (run.culprit, run.verdict.kind) == (1, "never_joined"), run
    assert "though ranks 0 and 2 have come through it" in run.verdict.sentence


def test_a_restart_that_was_refused_by_an_old_address_is_nobodys_fault_though_another_rank_came_through(
    tmp_path: Path,
) -> None:
    write_run(tmp_path)
    refused = "Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: Connection refused"
    write_rank(tmp_path, 0, {"type": "RuntimeError", "message": refused, "at_ns": 7, "where": frame(3)})
    wire.write_record(
        wire.rank_folder(tmp_path, 0, 0) / wire.JOINING,
        {"at_ns": 1, "rank": 0, "master": "", "world_size": 2, "where": frame(3)},
    )
    closed = "[/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
    write_rank(tmp_path, 1, {"type": "RuntimeError", "message": closed, "at_ns": 8, "where": frame(8)})
    evidence(tmp_path, 1, [("barrier", 8)], waits=False, within=[0, 1])
    found = {
        attempt: judge([replace(rank, attempt=attempt) for rank in Run.from_folder(tmp_path).ranks], Ending())
        for attempt in (0, 1)
    }
    assert (found[1].culprit, found[1].kind) == (None, "stale_addresses"), found[1]
    # In a first attempt there are no addresses of one before.
    assert found[0].kind != "stale_addresses", found[0]


def test_who_never_sent_a_rank_anything_owes_it_nothing(tmp_path: Path) -> None:
    """Rank 0 takes the last rank for its left neighbour on a rod that is no ring; the others are in the sum after it."""
    step: list[Call] = [("all_reduce", 5)]
    there: dict[str, Any] = {"calls": step * 2, "waits": True, "within": [0, 1, 2]}
    asks = {"calls": step, "waits": True, "line": 20, "peer": 2, "exchanged": [(1, "recv", 20, 1), (1, "recv", 20, 2)]}
    between = {**there, "exchanged": [(1, "send", 9, 0), (1, "recv", 20, 2)]}
    end = {**there, "exchanged": [(1, "send", 9, 1)]}
    run = hung(tmp_path, {**asks, "within": [0, 1, 2]}, between, end)
    assert run.culprit is None, run


def test_who_alone_sends_nothing_to_the_rank_that_asks_all_at_one_line_owes_it_a_message(tmp_path: Path) -> None:
    """And not where it asks at another line, or wants to send."""
    step: list[Call] = [("all_reduce", 5)]
    there: dict[str, Any] = {"calls": step * 2, "waits": True, "within": [0, 1, 2]}
    asks: dict[str, Any] = {"calls": step, "waits": True, "line": 20, "peer": 2, "within": [0, 1, 2]}
    took = [(1, "recv", 20, 1), (1, "recv", 20, 2)]
    sent = {**there, "exchanged": [(1, "send", 9, 0)]}
    run = hung(tmp_path / "owes", {**asks, "exchanged": took}, sent, there)
    assert (run.culprit, run.verdict.kind) == (2, "unmatched"), run
    assert "rank 0 waits for a message of it at the line where that of rank 1 came" in run.verdict.sentence
    other_line = [(1, "recv", 21, 1), (1, "recv", 20, 2)]
    assert hung(tmp_path / "line", {**asks, "exchanged": other_line}, sent, there).culprit is None
    sends = [(1, "recv", 20, 1), (1, "send", 20, 2)]
    assert hung(tmp_path / "sends", {**asks, "exchanged": sends}, sent, there).culprit is None


def test_who_took_a_message_of_anybody_may_have_taken_any(tmp_path: Path) -> None:
    """Rank 2 sends to rank 1, which has received of whichever rank sent, and not to rank 0, which waits for it."""
    step: list[Call] = [("all_reduce", 5)]
    to: list[list[tuple[int, str, int, int | None]]] = [
        [(1, "send", 20, 1), (1, "recv", 21, 2)],
        [(1, "recv", 22, None), (1, "send", 20, 2), (1, "recv", 21, 0)],
        [(1, "send", 20, 1), (1, "recv", 21, 1), (1, "send", 20, 1)],
    ]
    waits_for = [2, 0, 1]
    ranks = [
        {"calls": step, "waits": True, "line": 21, "peer": p, "exchanged": e}
        for p, e in zip(waits_for, to, strict=True)
    ]
    assert hung(tmp_path, *ranks).culprit is None


def test_who_is_aborted_once_its_peers_are_gone_has_not_aborted_the_job(tmp_path: Path) -> None:
    """Rank 1 of three joins another sum than the others; one of them aborts over it, and then rank 1, which has raised, too."""
    write_run(tmp_path, nproc=3)
    lost = {"type": "RuntimeError", "message": PEER_LOST.format(port=1)}
    for number, at_ns in enumerate((9 * 10**9, 8 * 10**9, 9 * 10**9)):
        aborted = {"exitcode": -6, "signal": "SIGABRT"} if number == 1 else {}
        write_rank(tmp_path, number, {**lost, "at_ns": at_ns}, **aborted)
        evidence(tmp_path, number, [("all_reduce", 5), ("all_reduce", 20 + number % 2, [4 + number % 2])], waits=True)
    run = Run.from_folder(tmp_path)
    assert (run.culprit, run.verdict.kind) == (1, "mismatch"), run
    assert run.diagnosis is not None and run.diagnosis.name == "collective_mismatch", run.diagnosis
