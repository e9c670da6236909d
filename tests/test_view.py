"""The live view's Python side: what it sends and keeps, without a browser."""

from __future__ import annotations

import json
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_for

from ddpkit.diagnosis.run import Diagnosis
from ddpkit.display.lane_feed import GAP, MOST_PENDING, MOST_REMEMBERED, MOST_SAMPLES, LaneFeed
from ddpkit.display.rows import Row, Standstill
from ddpkit.display.sink import Line, Now, RankNow
from ddpkit.display.view import RunView, hear_clicks_while_busy
from ddpkit.runfolder.failures import Failure
from ddpkit.runfolder.frames import Frame
from ddpkit.runfolder.ranks import Rank


def ended_rank(number: int, words: str = "passed", role: str = "passed", failure: Failure | None = None) -> Rank:
    """A rank of which nothing but its end was recorded."""
    code = 0 if role == "passed" else 1
    nowhere = Path("nowhere/ranks/attempt_0") / f"rank_{number}"
    return Rank(
        number, number, 0, nowhere, None, exitcode=code, failure=failure, peak_rss_mib=200.0, words=words, role=role
    )


@dataclass
class FakeVerdict:
    sentence: str = ""


@dataclass
class FakeRun:
    """As much of a `Run` as the view reads."""

    name: str = "broken"
    world_size: int = 2
    command: str = "torchrun --nproc-per-node 2 broken.py"
    facts: str = "2 ranks · gloo on CPU"
    started: str = "started warm"
    state: str = "running"
    revealed: bool = True
    verdict: FakeVerdict = field(default_factory=FakeVerdict)
    culprit: int | str | None = None
    ranks: tuple[Rank, ...] = (ended_rank(0), ended_rank(1))
    notes: tuple[str, ...] = ()
    diagnosis: Diagnosis | None = None


class ListeningView(RunView):
    """A view whose messages land in a list instead of a browser."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.came_at: list[float] = []
        self.fails = False
        super().__init__()

    def send(self, content: Any, buffers: Any = None) -> None:
        if self.fails:
            raise RuntimeError("no kernel")
        self.came_at.append(time.perf_counter())
        # Whatever is sent must be plain JSON: NaN is not.
        self.messages.append(json.loads(json.dumps(content, allow_nan=False)))

    @property
    def batches(self) -> list[dict[str, Any]]:
        return [m for m in self.messages if m["kind"] == "batch"]

    def rows(self, rank: int) -> list[list[Any]]:
        return [row for batch in self.batches for number, rows in batch["lanes"] if number == rank for row in rows]


@pytest.fixture
def view() -> Iterator[ListeningView]:
    shown = ListeningView()
    yield shown
    shown._over.set()
    shown._wake.set()


def line(seq: int, text: str = "hello", rank: int = 0, stream: str = "stdout", **more: Any) -> Line:
    return Line(rank, stream, seq, time.time_ns(), text, **more)


def now(elapsed_s: float = 1.0, skipped: dict[int, int] | None = None, rss: float | None = 100.0) -> Now:
    ranks = tuple(RankNow(rank, "running", "running", rss) for rank in (0, 1))
    return Now("running", elapsed_s, ranks, skipped or {})


def ended(view: ListeningView, **about: Any) -> dict[str, Any]:
    view.end(FakeRun(**about))  # type: ignore[arg-type]
    return json.loads(json.dumps(view.final))


def lines_told(rows: list[list[Any]]) -> int:
    return sum(row[2] if row[0] == GAP else 1 for row in rows if not row[4])


# Batches.


def test_the_first_line_after_a_quiet_time_goes_out_at_once(view: ListeningView) -> None:
    view.begin(FakeRun(), lambda: None)  # type: ignore[arg-type]
    waits = []
    for seq in range(1, 12):
        time.sleep(0.06)
        sent, before = len(view.messages), time.perf_counter()
        view.lines([line(seq)])
        wait_for(lambda sent=sent: len(view.messages) > sent)
        waits.append(view.came_at[sent] - before)
    assert sorted(waits)[len(waits) // 2] < 0.003


def test_lines_that_follow_fast_share_a_batch_and_arrive_once_in_order(view: ListeningView) -> None:
    view.begin(FakeRun(), lambda: None)  # type: ignore[arg-type]
    for seq in range(1, 51):
        view.lines([line(seq, f"line {seq}", rank=0), line(seq, f"line {seq}", rank=1)])
        time.sleep(0.004)
    ended(view, state="passed")
    for rank in (0, 1):
        assert [row[2] for row in view.rows(rank)] == [f"line {seq}" for seq in range(1, 51)]
    assert len(view.batches) < 25
    assert [batch["n"] for batch in view.batches] == list(range(1, len(view.batches) + 1))


def test_stderr_attempt_and_open_lines_are_told_apart(view: ListeningView) -> None:
    view.begin(FakeRun(), lambda: None)  # type: ignore[arg-type]
    view.lines(
        [line(1, "out"), line(1, "err", stream="stderr"), line(1, "10%", open=True), line(1, "again", attempt=1)]
    )
    ended(view, state="passed")
    assert [[row[0], *row[2:5]] for row in view.rows(0)] == [
        [0, "out", 0, 0],
        [1, "err", 0, 0],
        [0, "10%", 0, 1],
        [0, "again", 1, 0],
    ]


def test_a_line_says_whether_it_may_have_been_written_before_its_time() -> None:
    lane = LaneFeed()
    for seq, exact in enumerate((True, False), start=1):
        lane.add(Line(0, "stdout", seq, 2_540_000_000, "x", exact=exact), 2_000_000_000)
    assert [(row[1], row[5]) for row in lane.take(float("inf"))] == [(0.54, 0), (0.54, 1)]


def test_markup_and_odd_characters_travel_as_they_are(view: ListeningView) -> None:
    view.begin(FakeRun(), lambda: None)  # type: ignore[arg-type]
    text = "<script>alert(1)</script> \ufffd 日本語"
    view.lines([line(1, text)])
    ended(view, state="passed")
    assert view.rows(0)[0][2] == text


# Bounds.


def test_a_flood_is_cut_in_the_view_and_every_line_is_accounted_for(view: ListeningView) -> None:
    view.begin(FakeRun(), lambda: None)  # type: ignore[arg-type]
    tracemalloc.start()
    for start in range(0, 100_000, 400):
        view.lines([line(seq + 1, "x" * 80, rank=rank) for rank in (0, 1) for seq in range(start, start + 400)])
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    final = ended(view, state="passed")
    for rank in (0, 1):
        assert lines_told(view.rows(rank)) == 100_000
        assert view.rows(rank)[-1][0] != GAP
        assert lines_told(dict(final["lanes"])[rank]) == 100_000
        assert len(dict(final["lanes"])[rank]) <= MOST_REMEMBERED + 1
    # What was caught in this test's own list included.
    assert grown < 60e6


def test_pending_lines_beyond_the_bound_become_one_notice() -> None:
    lane = LaneFeed()
    for seq in range(1, MOST_PENDING + 1_001):
        lane.add(line(seq), 0)
    rows = lane.take(float("inf"))
    assert rows[0][0] == GAP and rows[0][2] == 1_000
    assert len(rows) == MOST_PENDING + 1


def test_a_jump_in_the_lines_numbers_becomes_a_notice_in_its_place() -> None:
    lane = LaneFeed()
    for seq in (8, 9, 50):
        lane.add(line(seq, f"line {seq}"), 0)
    assert [row[2] for row in lane.take(float("inf"))] == [7, "line 8", "line 9", 40, "line 50"]


def test_skipped_lines_are_not_told_twice(view: ListeningView) -> None:
    view.begin(FakeRun(), lambda: None)  # type: ignore[arg-type]
    view.lines([line(1), line(50)])
    view.now(now(skipped={0: 48}))
    view.now(now(skipped={0: 60, 1: 7}))
    ended(view, state="passed")
    assert sum(row[2] for row in view.rows(0) if row[0] == GAP) == 60
    assert sum(row[2] for row in view.rows(1) if row[0] == GAP) == 7


def test_progress_bars_do_not_pile_up() -> None:
    lane = LaneFeed()
    for percent in range(5_000):
        lane.add(line(0, f"{percent} of 5000", stream="stderr", open=True), 0)
        if percent % 10 == 0:
            lane.take(float("inf"))
    lane.take(float("inf"))
    assert len(lane.remembered) == 1
    assert lane.picture(10_000)[0][2] == "4999 of 5000"


def test_a_picture_is_bounded_by_its_text_too() -> None:
    lane = LaneFeed()
    for seq in range(1, 401):
        lane.add(line(seq, "x" * 2_000), 0)
    lane.take(float("inf"))
    rows = lane.picture(20_000)
    assert sum(len(str(row[2])) for row in rows) <= 20_000
    assert lines_told(rows) == 400


def test_the_memory_curve_is_thinned_not_cut() -> None:
    lane = LaneFeed()
    for second in range(10_000):
        lane.sample(float(second), 100.0, float("nan"))
    assert len(lane.samples) <= MOST_SAMPLES
    assert lane.samples[0][0] == 0.0 and lane.samples[-1][0] > 9_000
    assert lane.samples[0][2] is None


# Late views.


def test_a_view_that_asks_gets_a_picture_with_its_name(view: ListeningView) -> None:
    view.begin(FakeRun(), lambda: None)  # type: ignore[arg-type]
    view.lines([line(seq, f"line {seq}") for seq in range(1, 801)])
    view.now(now())
    wait_for(lambda: lines_told(view.rows(0)) == 800)
    view._hear(view, {"kind": "hello", "view": "v1"}, [])
    picture = wait_for(lambda: [m for m in view.messages if m["kind"] == "picture"])[0]
    assert picture["for"] == "v1" and picture["state"] == "running"
    assert picture["n"] == len(view.batches)
    rows = dict(picture["lanes"])[0]
    assert rows[0][:1] + rows[0][2:3] == [GAP, 800 - MOST_REMEMBERED]
    assert rows[-1][2] == "line 800"


def test_a_view_that_cannot_ask_is_told_unasked(view: ListeningView) -> None:
    view.begin(FakeRun(), lambda: None)  # type: ignore[arg-type]
    view._shown_at -= 1.5
    view.now(now())
    picture = wait_for(lambda: [m for m in view.messages if m["kind"] == "picture"])[0]
    assert picture["for"] == ""


# Stop.


def test_stop_reaches_the_job_and_is_acknowledged(view: ListeningView) -> None:
    stopped = threading.Event()
    view.begin(FakeRun(), stopped.set)  # type: ignore[arg-type]
    view._hear(view, {"kind": "stop"}, [])
    assert stopped.is_set()
    assert {"kind": "heard"} in view.messages
    view.now(now())
    wait_for(lambda: any(batch.get("state") == "stopping" for batch in view.batches))


def test_stop_after_the_end_does_nothing(view: ListeningView) -> None:
    stopped = threading.Event()
    view.begin(FakeRun(), stopped.set)  # type: ignore[arg-type]
    ended(view, state="passed")
    view._hear(view, {"kind": "stop"}, [])
    assert not stopped.is_set()


@pytest.mark.parametrize("content", [None, "stop", {}, {"kind": "dance"}, ["stop"]])
def test_unknown_messages_are_ignored(view: ListeningView, content: Any) -> None:
    view.begin(FakeRun(), lambda: pytest.fail("stopped"))  # type: ignore[arg-type]
    view._hear(view, content, [])


def test_clicks_stay_on_the_thread_the_front_end_names() -> None:
    class Comm:
        def _reply_subshell_for(self, data: object, default: str) -> str:
            return "the busy one"

    class Widget:
        comm = Comm()

    assert hear_clicks_while_busy(Widget())
    assert Widget.comm._reply_subshell_for({}, "subshell-1") == "subshell-1"


def test_a_kernel_without_subshells_is_left_alone() -> None:
    class Widget:
        comm = object()

    assert not hear_clicks_while_busy(Widget())
    assert not hear_clicks_while_busy(object())


# The end.

LOST = ended_rank(
    0,
    "lost its peer: a consequence",
    "consequence",
    Failure(1, "RuntimeError", "Connection closed by peer", ""),
)
RAISED = ended_rank(
    1,
    "raised ValueError",
    "culprit",
    Failure(2, "ValueError", "boom", "", where=Frame("t.py", 7, "f", "raise ValueError")),
)


def test_the_final_time_is_not_before_the_last_line(view: ListeningView) -> None:
    view.begin(FakeRun(), lambda: None)  # type: ignore[arg-type]
    view.now(now(elapsed_s=0.001))
    time.sleep(0.05)
    view.lines([line(1)])
    assert ended(view, state="passed")["at"] >= 0.05


def test_the_final_picture_holds_the_verdict_and_outlives_the_kernel(view: ListeningView) -> None:
    view.begin(FakeRun(), lambda: None)  # type: ignore[arg-type]
    view.lines([line(1, "last words")])
    view.now(now(2.5))
    final = ended(
        view,
        state="failed",
        culprit=1,
        verdict=FakeVerdict("Rank 1 raised ValueError."),
        ranks=(LOST, RAISED),
        notes=("a note",),
    )
    assert final["over"] and final["state"] == "failed" and final["at"] == 2.5
    assert final["still"]["sentence"] == "Rank 1 raised ValueError."
    assert not final["alike"] and final["note"] == "a note"
    assert [(row["rank"], row["tone"], row["where"]) for row in final["still"]["rows"]] == [
        (0, "waiting", ""),
        (1, "fault", "line 7: raise ValueError"),
    ]
    assert final["endings"][1] == [
        1,
        "culprit",
        "raised ValueError",
        "ValueError",
        "boom",
        "line 7: raise ValueError",
        200,
    ]
    assert dict(final["lanes"])[0][0][2] == "last words"
    assert view.get_state("final")["final"]["over"]


def test_without_the_reveal_nothing_tells_the_culprit_from_the_victim(view: ListeningView) -> None:
    view.begin(FakeRun(revealed=False), lambda: None)  # type: ignore[arg-type]
    final = ended(
        view, state="failed", culprit=1, verdict=FakeVerdict("Rank 1 did it."), ranks=(LOST, RAISED), revealed=False
    )
    assert final["still"]["sentence"] == "" and final["still"]["diagnosis"] is None
    assert {row["tone"] for row in final["still"]["rows"]} == {""}
    assert [ending[1:3] for ending in final["endings"]] == [
        ["failed", "raised RuntimeError"],
        ["failed", "raised ValueError"],
    ]
    assert "culprit" not in json.dumps(final) and "consequence" not in json.dumps(final)
    revealed = ended(view, state="failed", culprit=1, verdict=FakeVerdict("Rank 1 did it."), ranks=(LOST, RAISED))
    assert revealed["still"]["sentence"] == "Rank 1 did it."


def test_every_rank_alike_is_said(view: ListeningView) -> None:
    view.begin(FakeRun(), lambda: None)  # type: ignore[arg-type]
    assert ended(view, state="failed", culprit="every rank")["alike"]


def test_no_thread_is_left(view: ListeningView) -> None:
    view.begin(FakeRun(name="leaves nothing"), lambda: None)  # type: ignore[arg-type]
    assert "ddpkit shows leaves nothing" in {thread.name for thread in threading.enumerate()}
    ended(view, state="passed")
    assert "ddpkit shows leaves nothing" not in {thread.name for thread in threading.enumerate()}


def test_a_kernel_that_has_gone_does_not_disturb_the_job(view: ListeningView) -> None:
    view.begin(FakeRun(), lambda: None)  # type: ignore[arg-type]
    view.fails = True
    for seq in range(1, 5_001):
        view.lines([line(seq)])
    view.now(now())
    assert ended(view, state="passed")["state"] == "passed"
    assert view._gone


# A job that stands still.

STACK = (Frame("/home/me/train.py", 14, "load_batch", "time.sleep(60)"),)
ROWS = (
    Row(0, "waits", "waiting", "line 12: dist.all_reduce(x)", "all_reduce #4", waits=True, silent_s=9.0, busy=0.0),
    Row(1, "sits idle", "fault", "line 14: time.sleep(60)", "all_reduce #3", silent_s=10.0, busy=0.0, stack=STACK),
)
STILL = Standstill("Rank 1 has not joined all_reduce #4.", ROWS, 12.0)


def stalled(still: Standstill | None, elapsed_s: float = 12.5) -> Now:
    return replace(now(elapsed_s), still=still)


def told(view: ListeningView) -> list[Any]:
    """What was said of the standstill, in order."""
    return [batch["still"] for batch in view.batches if "still" in batch]


def test_a_standstill_is_told_once_and_withdrawn_once(view: ListeningView) -> None:
    view.begin(FakeRun(), lambda: None)  # type: ignore[arg-type]
    for still in (None, STILL, STILL, replace(STILL), None, None):
        sent = len(view.batches)
        view.now(stalled(still))
        wait_for(lambda sent=sent: len(view.batches) > sent)
    found, withdrawn = told(view)
    assert withdrawn is None
    assert found["sentence"] == STILL.sentence and found["at"] == 12.0
    assert [row["tone"] for row in found["rows"]] == ["waiting", "fault"]
    assert found["rows"][1]["stack"] == [[1, 14, "time.sleep(60)", "load_batch", "train.py"]]


def test_a_late_view_learns_of_the_standstill(view: ListeningView) -> None:
    view.begin(FakeRun(), lambda: None)  # type: ignore[arg-type]
    view.now(stalled(STILL))
    wait_for(lambda: told(view))
    view._hear(view, {"kind": "hello", "view": "v1"}, [])
    picture = wait_for(lambda: [m for m in view.messages if m["kind"] == "picture"])[0]
    assert picture["still"] == told(view)[0]


def test_nothing_is_left_of_a_standstill_when_the_job_has_passed(view: ListeningView) -> None:
    view.begin(FakeRun(), lambda: None)  # type: ignore[arg-type]
    view.now(stalled(STILL))
    assert ended(view, state="passed")["still"] is None


# The text form.


def test_the_text_form_never_varies(view: ListeningView) -> None:
    view.begin(FakeRun(), lambda: None)  # type: ignore[arg-type]
    before = view._repr_mimebundle_()[0]
    ended(view, state="passed")
    after = view._repr_mimebundle_()[0]
    assert before["text/plain"] == after["text/plain"] == "live view of broken: 2 ranks"
    assert "application/vnd.jupyter.widget-view+json" in after
