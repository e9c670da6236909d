"""Whose number made all ranks raise, from recorded evidence alone."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_records import write_rank, write_run

from ddpkit import Run
from ddpkit.recorder import failure
from ddpkit.recorder.values import MOST_SUMMED, number_of
from ddpkit.runfolder import wire

NAN = float("nan")
LAST = {"file": "/t.py", "line": 5, "function": "f", "source": "raise Aborted(total)", "own": True}


def raised(
    folder: Path,
    brought: Sequence[Sequence[float | None]],
    reduces: str = "SUM",
    last: dict[str, Any] | None = None,
    left: Sequence[int] = (),
    root: int | None = None,
    size: int = 1,
) -> Run:
    """A run whose ranks `brought` these numbers, one list a round, to one collective, and raised after the last at the line
    `last`, but those that have `left` with exit code 0. With a `root`, that one sent its numbers to all. Of a `size` other
    than 1 each is the sum of so many."""
    frame = LAST | (last or {})
    write_run(folder, nproc=len(brought[0]))
    for rank in range(len(brought[0])):
        failure = {"type": "Aborted", "at_ns": 100 + rank, "frames": [frame], "source": frame["source"]}
        write_rank(folder, rank, None if rank in left else failure, exitcode=int(rank not in left))
        entries = [
            {
                "seq": number,
                "op": "all_reduce" if root is None else "broadcast",
                "p2p": False,
                "group": "0",
                "group_name": "default_pg",
                "ranks": [],
                "sizes": [[size]],
                "dtypes": ["Float"],
                "at_ns": number,
                "done": True,
                "where": LAST | {"line": 3},
                "brings": numbers[rank],
                "reduces": reduces,
                "root": root,
            }
            for number, numbers in enumerate(brought, 1)
        ]
        record = {"at_ns": 1, "enqueued": {}, "completed": {}, "entries": entries}
        wire.write_record(wire.rank_folder(folder, 0, rank) / wire.COLLECTIVES, record)
    return Run.from_folder(folder)


@pytest.mark.parametrize(
    ("brought", "reduces", "culprit"),
    [
        pytest.param([[0, 1, 0]], "SUM", 1, id="an error is summed"),
        pytest.param([[0, 1]], "SUM", 1, id="an error of two ranks is summed"),
        pytest.param([[1, 0, 1]], "SUM", 1, id="all but one are well"),
        pytest.param([[1, 0, 1]], "MAX", (0, 2), id="any error is one"),
        pytest.param([[0, 0, 1]], "MIN", (0, 1), id="all must be well"),
        pytest.param([[0, 0, 1, 0]], "", 2, id="numbers are gathered"),
        pytest.param([[2.5, NAN, 0.5]], "SUM", 1, id="a loss is not a number"),
        pytest.param([[1, 1], [1, 1], [1, 0]], "SUM", 1, id="all were well before"),
        pytest.param([[8, 8], [8, 8], [5, 8]], "SUM", "every rank", id="the last batch is smaller"),
        pytest.param([[8, 8], [8, 8], [5, 8]], "MIN", 0, id="all had as many before"),
        pytest.param([[10, 9, 10]], "MAX", 1, id="most have as many"),
        pytest.param([[1.5, 1.5, 1.5], [2.5, 1.5, 2.5]], "", 1, id="most have gone on"),
        pytest.param([[3.25, 3.25, 3.5]], "", 2, id="most have the same sum"),
        pytest.param([[10, 9]], "", "every rank", id="two have different counts"),
        pytest.param([[0, 0], [0, 0]], "SUM", "every rank", id="all bring the same"),
        pytest.param([[1, 1, 1]], "MAX", "every rank", id="all have an error"),
        pytest.param([[2.5, 0.5]], "SUM", "every rank", id="losses differ"),
        pytest.param([[0.0, 0.5]], "SUM", "every rank", id="a loss may be zero"),
        pytest.param([[3, 4], [7, 4], [9, 0]], "SUM", "every rank", id="counts differ always"),
        pytest.param([[0, None, 1]], "SUM", "every rank", id="a number is not known"),
    ],
)
def test_whose_number_made_all_raise(
    tmp_path: Path, brought: list[list[float | None]], reduces: str, culprit: object
) -> None:
    run = raised(tmp_path, brought, reduces)
    page = "nan_loss" if any(number is not None and math.isnan(number) for number in brought[-1]) else "own_exception"
    assert (run.culprit, run.diagnosis.name) == (culprit, page)
    assert ("brought" in run.verdict.sentence) == (culprit != "every rank")


@pytest.mark.parametrize(
    ("brought", "culprit", "what"),
    [
        pytest.param([[0, 0, 77]], 2, "word of an error", id="one text"),
        pytest.param([[77, 0, 78]], (0, 2), "word of an error", id="two texts"),
        pytest.param([[0, 0, 0], [0, 77, 0]], 1, "word of an error", id="none before"),
        pytest.param([[55, 55, 66]], 2, "another text", id="most have the same"),
        pytest.param([[44, 44, 44], [66, 55, 55]], 0, "another text", id="all had the same before"),
        pytest.param([[55, 66, 77]], "every rank", "", id="each has its own"),
        pytest.param([[55, 66]], "every rank", "", id="two differ"),
    ],
)
def test_whose_text_made_all_raise(
    tmp_path: Path, brought: list[list[float | None]], culprit: object, what: str
) -> None:
    run = raised(tmp_path, brought, "object")
    assert (run.culprit, run.diagnosis.name) == (culprit, "own_exception")
    assert f"brought {what} to" in run.verdict.sentence or culprit == "every rank"


@pytest.mark.parametrize(
    ("dtypes", "culprit", "page"),
    [
        pytest.param(["Long", "Double", "Long"], 1, "collective_mismatch", id="one of three"),
        pytest.param(["Long", "Double"], None, "collective_mismatch", id="one of two"),
        pytest.param(["Long", "Long"], "every rank", "own_exception", id="none"),
    ],
)
def test_whose_type_made_all_raise(tmp_path: Path, dtypes: list[str], culprit: object, page: str) -> None:
    """gloo lets numbers of another type pass where they have as many bytes."""
    run = raised(tmp_path, [[5.0] * len(dtypes)])
    for rank, dtype in enumerate(dtypes):
        path = wire.rank_folder(tmp_path, 0, rank) / wire.COLLECTIVES
        record = wire.read_record(path) or {}
        entries = [{**entry, "dtypes": [dtype]} for entry in record["entries"]]
        # No rank passes anything on in a barrier.
        barrier = {**entries[-1], "seq": len(entries) + 1, "op": "barrier", "sizes": [], "dtypes": [], "brings": None}
        wire.write_record(path, {**record, "entries": [*entries, barrier]})
    run = Run.from_folder(tmp_path)
    assert (run.culprit, run.diagnosis.name) == (culprit, page)
    assert ("After it every rank raised Aborted" in run.verdict.sentence) == (page == "collective_mismatch")


@pytest.mark.parametrize(
    ("brought", "reduces", "culprit"),
    [
        pytest.param([[2.5, NAN, 0.5]], "SUM", 1, id="weights are not finite"),
        pytest.param([[NAN, NAN]], "SUM", "every rank", id="nor are those of any"),
        pytest.param([[7.25, 7.25, 7.5]], "", 2, id="replicas differ"),
        pytest.param([[7.25, 7.25, 7.5]], "SUM", "every rank", id="gradients differ"),
        pytest.param([[0, 0, 1]], "SUM", "every rank", id="counts differ"),
        pytest.param([[0, 0, 1]], "", "every rank", id="one alone has any"),
        pytest.param([[7.25, 7.5]], "", "every rank", id="two differ"),
    ],
)
def test_whose_numbers_made_all_raise_their_sum_tells(
    tmp_path: Path, brought: list[list[float | None]], reduces: str, culprit: object
) -> None:
    run = raised(tmp_path, brought, reduces, size=8)
    assert run.culprit == culprit
    assert ("brought numbers whose sum is" in run.verdict.sentence) == (culprit != "every rank")


@pytest.mark.parametrize(
    ("held", "message", "culprit"),
    [
        (((), ("loss",), ()), "loss is nan", 1),
        ((("loss",), ("x", "loss"), ("loss",)), "non-finite gradients", 1),
        ((("loss",), ("loss",), ("loss",)), "loss is nan", "every rank"),
        (((), (), ()), "loss is nan", "every rank"),
        (((), ("best",), ()), "no such file", "every rank"),
    ],
    ids=["one has it", "one has more of it", "all have it", "nobody has it", "another error"],
)
def test_who_alone_held_nan_as_all_raised_over_it(
    tmp_path: Path, held: tuple[tuple[str, ...], ...], message: str, culprit: object
) -> None:
    write_run(tmp_path, nproc=3)
    for rank, names in enumerate(held):
        write_rank(tmp_path, rank, {"type": "RuntimeError", "message": message, "at_ns": 100 + rank, "nan_in": names})
    run = Run.from_folder(tmp_path)
    assert run.culprit == culprit
    if culprit == 1:
        assert run.ranks[0].words == "met another rank's nan: a consequence"


def test_a_failure_has_the_variables_that_held_nan() -> None:
    def step() -> None:
        loss, other, batch = NAN, float("inf"), torch.tensor([1.0, NAN])
        raise FloatingPointError(f"{loss} {other} {batch}")

    with pytest.raises(FloatingPointError) as caught:
        step()
    assert failure.described(caught.value)["nan_in"] == ["loss", "batch"]


def test_a_sum_is_kept_of_few_numbers_only() -> None:
    few, many = torch.full((8,), 0.5), torch.ones(MOST_SUMMED + 1)
    assert (number_of("all_reduce", {"tensor": few}), number_of("all_reduce", {"tensor": many})) == (4.0, None)
    assert number_of("all_reduce", {"tensor": torch.full((2,), 65504.0, dtype=torch.float16)}) == 131008.0


def test_who_raised_for_another_is_said_to_be_a_consequence(tmp_path: Path) -> None:
    run = raised(tmp_path, [[0, 1, 0]])
    assert run.verdict.sentence == (
        "Rank 1 brought 1 to all_reduce #1 (line 3: raise Aborted(total)), ranks 0 and 2 0; "
        "on that every rank raised Aborted: boom (line 3: raise Aborted(total))."
    )
    assert [rank.role for rank in run.ranks] == ["consequence", "culprit", "consequence"]
    assert run.ranks[0].words == "was told that a rank had failed: a consequence"


def test_who_raised_what_it_had_told_of_is_quoted(tmp_path: Path) -> None:
    run = raised(tmp_path, [[0, 1, 0]])
    own = {"type": "KeyError", "message": "'label'", "at_ns": 200, "frames": [], "chain": [], "traceback": ""}
    record = {**own, "where": LAST | {"line": 9, "source": "row['label']"}}
    wire.write_record(wire.rank_folder(tmp_path, 0, 1) / wire.FAILURE, record)
    assert Run.from_folder(run.folder).verdict.sentence == (
        "Rank 1 raised KeyError: 'label' (line 9: row['label']); before, rank 1 brought 1 to all_reduce #1 "
        "(line 3: raise Aborted(total)), ranks 0 and 2 0; on that ranks 0 and 2 raised Aborted: boom "
        "(line 3: raise Aborted(total))."
    )


def test_who_left_quietly_after_it_told_of_its_error_is_named(tmp_path: Path) -> None:
    run = raised(tmp_path, [[0, 0, 0], [0, 1, 0]], left=[1])
    assert (run.culprit, run.verdict.kind) == (1, "told_by_others")
    assert "ranks 0 and 2 0; on that ranks 0 and 2 raised Aborted" in run.verdict.sentence


@pytest.mark.parametrize("last", [{"source": "x = y / 0"}, {"own": False}], ids=["not by choice", "in a library"])
def test_what_nobody_chose_to_raise_is_no_matter_of_a_number(tmp_path: Path, last: dict[str, Any]) -> None:
    assert raised(tmp_path, [[0, 1, 0]], last=last).culprit == "every rank"


def test_of_objects_what_was_found_in_them_is_said(tmp_path: Path) -> None:
    run = raised(tmp_path, [[0, 0], [0, 0], [1, 0], [1, 0]], "object")
    assert run.culprit == 0 and "Rank 0 brought word of an error to all_reduce #4" in run.verdict.sentence
    assert ", unlike rank 1; on that every rank raised" in run.verdict.sentence


@pytest.mark.parametrize(
    ("sent", "culprit"),
    [([1], 0), ([0, 1], 0), ([0, NAN], 0), ([1, 1], "every rank"), ([0], "every rank"), ([7], "every rank")],
)
def test_whoever_sent_all_ranks_the_number_on_which_they_raised(
    tmp_path: Path, sent: list[float], culprit: object
) -> None:
    run = raised(tmp_path, [[number, 0, 0] for number in sent], "", root=0)
    assert run.culprit == culprit
    assert (f"Rank 0 sent {sent[-1]:g} to the others in broadcast #" in run.verdict.sentence) == (culprit == 0)


class Status(NamedTuple):
    """What a program may gather."""

    rank: int
    error: str | None


@pytest.mark.parametrize(
    ("told", "number"),
    [
        (None, 0),
        ("", 0),
        ("disk is full", zlib.crc32(b"disk is full")),
        ("OK", 0),
        (ValueError("boom"), 1),
        ({"rank": 1, "error": None}, 0),
        ({"rank": 1, "error": "boom"}, 1),
        ({"ok": False, "loss": 0.5}, 1),
        ({"loss": 0.5}, 0),
        (Status(3, None), 0),
        (Status(3, "boom"), 1),
        ((3, None), 0),
        ((3, "boom"), 1),
        (True, 1),
        (3, 0),
    ],
)
def test_whether_an_object_tells_of_an_error(told: object, number: int) -> None:
    assert number_of("all_gather_object", {"obj": told}) == number


def test_a_text_that_is_sent_to_all_tells_of_an_error_only_in_words() -> None:
    sent = [
        number_of("broadcast_object_list", {"object_list": [text]}) for text in ("run-7", "OSError: no space", None)
    ]
    assert sent == [0, 1, 0]
