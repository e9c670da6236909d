"""Whatever ranks print - floods, bad bytes, progress bars, markup - arrives whole in the run and bounded in the view."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import BLOCKED, needs_record, wait_for, wait_for_line

import ddpkit
from ddpkit.display.rows import Row, Standstill
from ddpkit.display.sink import Line, Now
from ddpkit.display.terminal import TextSink
from ddpkit.launcher import target
from ddpkit.runfolder import folders, wire
from ddpkit.watcher.tail import LONGEST_LINE, Tail, clean


class Recorder:
    """A sink that keeps what it is told."""

    wants_every_line = False

    def __init__(self) -> None:
        self.seen: list[Line] = []
        self.states: list[Now] = []
        self.ended: ddpkit.Run | None = None

    def begin(self, run: ddpkit.Run, stop: Callable[[], None]) -> None:
        self.stop = stop

    def lines(self, batch: Sequence[Line]) -> None:
        self.seen += batch

    def now(self, now: Now) -> None:
        self.states.append(now)

    def end(self, run: ddpkit.Run) -> None:
        self.ended = run

    def rss(self) -> list[float]:
        """Every memory figure that came for a running rank."""
        return [r.rss_mib for state in self.states for r in state.ranks if r.rss_mib and r.kind == "running"]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Makes the next launches speak to this sink."""
    sink = Recorder()
    monkeypatch.setattr("ddpkit.display.notebook.sink_for", lambda show: sink)
    return sink


@pytest.mark.job
def test_a_flood_is_whole_in_the_run(script: Callable[..., str], recorded: Recorder) -> None:
    path = script(
        """
        import os, sys
        rank = os.environ["RANK"]
        for i in range(100_000):
            sys.stdout.write(f"{rank} {i:06d} ".ljust(79, "x") + "\\n")
        """
    )
    run = ddpkit.launch(path, timeout=240)
    assert run.ok, str(run)
    for rank in run.ranks:
        lines = rank.stdout.splitlines()
        assert len(lines) == 100_000
        assert lines == [f"{rank.rank} {i:06d} ".ljust(79, "x") for i in range(100_000)]
    shown = len([line for line in recorded.seen if not line.open])
    assert shown + sum(recorded.states[-1].skipped.values()) <= 200_000
    last = {line.rank: line.text for line in recorded.seen}
    assert all(last[r].startswith(f"{r} 099999 ") for r in (0, 1)), "the end of a flood is always shown"


@pytest.mark.job
def test_lines_arrive_while_the_job_runs_and_states_follow(script: Callable[..., str], recorded: Recorder) -> None:
    path = script(
        """
        import os, sys, time
        print("first", flush=True)
        print("to stderr", file=sys.stderr, flush=True)
        while not os.path.exists("go"):
            time.sleep(0.01)
        print("second", flush=True)
        """
    )
    run = ddpkit.launch(path, timeout=120, wait=False)
    wait_for(lambda: [s.text for s in recorded.seen].count("first") == 2 and recorded.rss(), 60)
    assert run.state == "running"
    assert {(s.rank, s.text) for s in recorded.seen if s.stream == "stdout"} == {(0, "first"), (1, "first")}
    Path("go").touch()
    assert run.wait(60).ok
    assert wait_for(lambda: recorded.ended, 10) is run
    assert [s.text for s in recorded.seen if s.rank == 1 and s.stream == "stdout"] == ["first", "second"]
    assert recorded.rss()


@pytest.mark.job
def test_strange_bytes_are_shown_sanely(script: Callable[..., str], recorded: Recorder) -> None:
    path = script(
        r"""
        import sys
        out = sys.stdout.buffer
        out.write(b"bad \xff\xfe bytes\n")
        out.write(b"\x1b[31mred\x1b[0m and \x1b]0;title\x07plain\n")
        for i in range(5):
            out.write(f"\r{i * 25}%".encode())
        out.write(b"\n")
        out.write(b"<script>alert(1)</script>\n")
        out.write(b"y" * 10_000_000 + b"\n")
        out.write(b"no newline at the end")
        out.flush()
        """
    )
    run = ddpkit.launch(path, nproc=1, timeout=120)
    assert run.ok, str(run)
    assert len(run.ranks[0].stdout) > 10_000_000
    texts = [line.text for line in recorded.seen if not line.open]
    assert texts[0] == "bad \ufffd\ufffd bytes"
    assert texts[1] == "red and plain"
    assert texts[2] == "100%"
    assert texts[3] == "<script>alert(1)</script>"
    assert texts[4].startswith("yyy") and "more characters" in texts[4]
    assert texts[-1] == "no newline at the end"
    assert max(map(len, texts)) < LONGEST_LINE + 100


def test_markup_in_output_is_escaped_in_html(tmp_path: Path) -> None:
    from test_records import recorded_run

    run = recorded_run(tmp_path, message="<script>alert(1)</script>", source="raise X('<img onerror=1>')")
    assert "<script>" not in run._repr_html_()
    assert "<img" not in run._repr_html_()
    assert "&lt;script&gt;" in run._repr_html_()


def test_a_progress_bar_without_newline_is_shown_open_and_folded(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"")
    tail = Tail(path, 0, "stdout", 0)
    with open(path, "ab", buffering=0) as file:
        file.write(b"10%")
        assert tail.read() == []
        time.sleep(0.15)
        shown = tail.read()
        assert [(s.text, s.open) for s in shown] == [("10%", True)]
        time.sleep(0.15)
        file.write(b"\r20%")
        # A bar that never rests is shown all the same, at the moment that it changes.
        assert [(s.text, s.open) for s in tail.read()] == [("20%", True)]
        file.write(b"\r   \r")
        time.sleep(0.15)
        assert tail.read() == []
        file.write(b"\r30%\nnext\n")
        assert [(s.text, s.open) for s in tail.read()] == [("30%", False), ("next", False)]
    assert tail.close() == []


def test_a_line_in_two_writes_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"loss = 0.")
    tail = Tail(path, 0, "stdout", 0)
    assert tail.read() == []
    with open(path, "ab") as file:
        file.write(b"25\n")
    assert [s.text for s in tail.read()] == ["loss = 0.25"]


def test_a_multibyte_character_split_between_reads_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes("é".encode()[:1])
    tail = Tail(path, 0, "stdout", 0)
    assert tail.read() == []
    with open(path, "ab") as file:
        file.write("é".encode()[1:] + b"\n")
    assert [s.text for s in tail.read()] == ["é"]


def test_the_time_of_a_line_is_known_or_is_said_to_be_the_latest(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"")
    tail = Tail(path, 0, "stdout", 0, since_ns=time.time_ns())
    found = []
    for text in (b"alone\n", b"one\ntwo\n", b"and one more\nopen", b" no more\n"):
        assert tail.read() == []
        time.sleep(0.15)
        with open(path, "ab") as file:
            file.write(text)
        time.sleep(0.15)
        written_ns, read_ns = path.stat().st_mtime_ns, time.time_ns()
        found += tail.read()
        # The watcher came late; the file says when it was last written.
        assert {line.written_ns for line in found[-1:]} == {written_ns} and read_ns - written_ns > 1e8
    assert [(line.text, line.exact) for line in found] == [
        ("alone", True),
        ("one", False),
        ("two", False),
        ("and one more", False),
        ("open no more", True),
    ]
    # A clock that is wrong, as on a network file system, is not believed.
    with open(path, "ab") as file:
        file.write(b"last\n")
    os.utime(path, (1e9, 1e9))
    assert [line.written_ns > read_ns for line in tail.read()] == [True]


@pytest.mark.job
def test_lines_have_the_times_at_which_their_ranks_wrote_them(script: Callable[..., str], recorded: Recorder) -> None:
    path = script(
        """
        import time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        for step in range(20):
            dist.all_reduce(torch.ones(1))
            print(time.time_ns())
            time.sleep(0.2 if step > 3 else 0)
        """
    )
    assert ddpkit.launch(path, timeout=120).ok
    for rank in (0, 1):
        late_s = [(line.written_ns - int(line.text)) / 1e9 for line in recorded.seen if line.rank == rank]
        exact = [line.exact for line in recorded.seen if line.rank == rank]
        assert len(late_s) == 20 and sum(exact) > 10, f"only {sum(exact)} of rank {rank}'s times are known"
        assert all(-0.02 < late < (0.2 if known else 30) for late, known in zip(late_s, exact, strict=True)), late_s


def test_clean_says_how_much_it_left_out() -> None:
    assert clean(b"x" * 5000).endswith(" … 3,000 more characters, see run.ranks")


@pytest.mark.job
def test_a_log_over_the_cap_is_cut_in_the_middle_and_said(
    script: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(wire.ENV_LOG_CAP, "4")
    path = script(
        """
        import sys, time
        for block in range(24):
            for i in range(8192):
                sys.stdout.write(f"{block:03d} {i:06d} ".ljust(127, "x") + "\\n")
            time.sleep(0.1)
        """
    )
    run = ddpkit.launch(path, nproc=1, timeout=120, show=False)
    assert run.ok, str(run)
    log = run.ranks[0].log_folder / "stdout.log"
    assert log.stat().st_size == 24 * 2**20
    assert log.stat().st_blocks * 512 < 12 * 2**20, "the middle was not given back to the disk"
    text = run.ranks[0].stdout
    assert text.startswith("000 000000") and text.rstrip("x\n").endswith("023 008191 ")
    assert "MiB are missing here" in text
    assert "\0" not in text
    assert any("capped at 4 MiB" in note for note in run.notes)


@pytest.mark.job
def test_the_text_stream_tags_every_line_with_its_rank(home: Path) -> None:
    (home / "speak.py").write_text("import os\nfor i in range(3000): print('line', i, 'of', os.environ['RANK'])\n")
    command = [Path(sys.executable).with_name("ddpkit"), "run", "-n", "2", "speak.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        tagged = [line for line in done.stdout.splitlines() if line.startswith(f"rank {rank} │")]
        assert tagged == [f"rank {rank} │ line {i} of {rank}" for i in range(3000)]
    assert done.stdout.splitlines()[-1] == "speak → passed · 2 ranks"


def test_a_target_is_written_and_named(home: Path) -> None:
    cell = target.of_text("print(1)\n", "my run!", ["--lr", "0.1"])
    command = cell.write(home)
    assert command == [str(home / "my_run.py"), "--lr", "0.1"]
    assert folders.home() == home / ".ddpkit"


# A job that stands still, as text.

FOUND = Standstill(
    "Rank 1 has not joined all_reduce #4.",
    (
        Row(0, "waits", "waiting", "line 12: dist.all_reduce(x)", "all_reduce #4", waits=True),
        Row(1, "sits idle", "fault", "line 14: time.sleep(60)"),
    ),
    12.0,
)


def test_a_standstill_is_printed_once_and_its_withdrawal_once(capsys: pytest.CaptureFixture[str]) -> None:
    sink, note = TextSink(), "No rank has made progress for 10 s."
    for still in (None, FOUND, FOUND, replace(FOUND, at_s=13.0), None, None):
        sink.now(Now("running", 12.5, (), {}, note if still else "", still))
    assert capsys.readouterr().out.splitlines() == [
        "ddpkit: No rank has made progress for 10 s.",
        "ddpkit: Rank 1 has not joined all_reduce #4.",
        "ddpkit:   rank 0  waits in all_reduce #4  line 12: dist.all_reduce(x)",
        "ddpkit:   rank 1  sits idle               line 14: time.sleep(60)",
        "ddpkit: The job goes on by itself.",
    ]


@needs_record
@pytest.mark.job
def test_a_job_that_stands_still_and_comes_back_says_both(script: Callable[..., str], recorded: Recorder) -> None:
    path = script(
        """
        import os, time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        print("ready", flush=True)
        if dist.get_rank() == 1:
            while not os.path.exists("go"):
                time.sleep(0.05)
        dist.all_reduce(torch.ones(3))
        print("goes on", flush=True)
        time.sleep(1)
        """
    )
    run = ddpkit.launch(path, stall=2, timeout=60, wait=False)
    still = wait_for(lambda: next((s.still for s in recorded.states if s.still), None), 30)
    assert still.sentence.startswith("Rank 1 has not joined all_reduce #1")
    assert [(row.words, row.tone) for row in still.rows] == [
        ("waits in all_reduce #1", "waiting"),
        ("sits idle", "fault"),
    ]
    assert "time.sleep(0.05)" in still.rows[1].where or "os.path.exists" in still.rows[1].where
    assert recorded.states[-1].ranks[0].words == "waits in all_reduce #1"
    assert recorded.states[-1].note == "No rank has made progress for 2 s."
    Path("go").touch()
    assert run.wait(60).ok
    assert recorded.states[-1].still is None


@needs_record
@pytest.mark.job
def test_ranks_that_print_nothing_are_told_by_what_they_do(script: Callable[..., str], recorded: Recorder) -> None:
    path = script(
        """
        import os, time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        some = dist.new_group([1, 2])
        rank = dist.get_rank()
        if rank == 2:
            print("speaks")
        while not os.path.exists("go") and rank != 1:
            if rank != 3:
                time.sleep(0.05)
        if rank in (1, 2):
            dist.broadcast(torch.ones(3), 2, group=some)
        dist.destroy_process_group()
        """
    )
    run = ddpkit.launch(path, nproc=4, stall=None, timeout=120, wait=False)
    expected = ["sits idle", "in broadcast #1 of group 1", "running", "computes"]
    wait_for(lambda: recorded.states and [r.words for r in recorded.states[-1].ranks] == expected, 60)
    Path("go").touch()
    assert run.wait(60).ok, str(run)


@needs_record
@pytest.mark.job
def test_without_the_reveal_a_standstill_is_told_in_facts(script: Callable[..., str], recorded: Recorder) -> None:
    path = script(BLOCKED)
    # Ended by hand: a job that the stall itself ends may be told of when its ranks are ending already.
    run = ddpkit.launch(path, stall=2, timeout=60, reveal=False, wait=False)
    wait_for_line(run, "ready")
    still = wait_for(lambda: [s.still for s in list(recorded.states) if s.still and s.still.rows[0].collective], 60)[0]
    run.stop()
    assert still.sentence == ""
    assert {(row.state, row.tone) for row in still.rows} <= {("sleeping", ""), ("running", "")}
    assert [row.collective for row in still.rows] == ["all_reduce #1", ""]
    assert all(row.stack for row in still.rows)
