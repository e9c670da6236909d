"""What a rank waits for outside of torch.distributed is seen: a lock on a file, and that at which a loop looks."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import textwrap
from pathlib import Path

import pytest

from ddpkit.watcher import program_text


def _lock(path: Path) -> None:
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def test_what_is_sent_and_received_below_a_line_is_ahead_of_it() -> None:
    program = textwrap.dedent(
        """
        def report():
            dist.isend(x, 1)
            dist.barrier()
            if rank == 0:
                dist.send(x, 2)
        report()
        dist.recv(x, 1)
        """
    )
    assert program_text.exchanges_ahead(program, 4) == ["send"]
    assert program_text.exchanges_ahead(program, 6) == []
    assert program_text.exchanges_ahead(program, 7) == ["recv"]
    assert program_text.exchanges_ahead("no program (", 1) == []


def test_the_holder_of_a_lock_is_told_of_all_that_wait_for_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiters = [multiprocessing.get_context("fork").Process(target=_lock, args=(path,)) for _ in range(3)]
        for waiter in waiters:
            waiter.start()
        wanted = {waiter.pid: os.getpid() for waiter in waiters}
        try:
            while not wanted.items() <= (found := program_text.locked_by({})).items():
                assert all(waiter.is_alive() for waiter in waiters), found
        finally:
            fcntl.flock(held, fcntl.LOCK_UN)
    for waiter in waiters:
        waiter.join()
        assert waiter.exitcode == 0
    assert not wanted.keys() & program_text.locked_by({}).keys()


@pytest.mark.parametrize(
    ("where", "wanted"), [("filelock/_api.py", True), ("filelock/_unix.py", True), ("own/filelocks.py", False)]
)
def test_a_lock_that_is_asked_for_again_and_again(tmp_path: Path, where: str, wanted: bool) -> None:
    path = tmp_path / "lock"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        local = {"name": "lock_filename", "repr": f'"{path}"'}
        frames = [{"name": "BaseFileLock.acquire", "filename": f"/site-packages/{where}", "locals": [local]}]
        # Process 1 has no part in it, and stands for one that waits.
        assert (program_text.locked_by({1: [{"frames": frames}]}).get(1) == os.getpid()) == wanted


@pytest.mark.parametrize(
    ("loop", "line", "wanted"),
    [
        ("while not os.path.exists(mark):\n    time.sleep(0.1)", 2, True),
        ("while True:\n    if found():\n        break\n    time.sleep(1)", 4, True),
        ("while True:\n    sleep(1)", 2, False),
        ("for turn in range(9):\n    time.sleep(1)", 2, False),
        ("while not os.path.exists(mark):\n    look()", 2, False),
        ("while not done:\n    while True:\n        time.sleep(1)", 3, False),
        ("while not done:\n    time.sleep(1", 2, False),
        ("while sent < size:\n    sent += 4096\n    time.sleep(1)", 3, False),
        ("while tries < 9:\n    tries += 1\n    if found():\n        break\n    time.sleep(1)", 5, True),
        (
            "while len(seen) < 9:\n    time.sleep(1)\n    seen.append(1)\n    if max(seen) > limit:\n        break",
            2,
            False,
        ),
        ("while True:\n    state = job.poll()\n    if state is not None:\n        break\n    time.sleep(1)", 5, True),
        ("while not self.ready:\n    time.sleep(1)", 2, True),
        ("while job.state != 'done':\n    job.refresh()\n    time.sleep(1)", 3, True),
        ("while time.monotonic() < until:\n    time.sleep(1)", 2, False),
        ("while tries < 9 and not found():\n    tries += 1\n    time.sleep(1)", 3, True),
    ],
)
def test_which_sleep_is_between_two_looks_at_something(loop: str, line: int, wanted: bool) -> None:
    source = "def wait():\n" + textwrap.indent(loop, "    ")
    assert program_text.polls(source, line + 1) == wanted
