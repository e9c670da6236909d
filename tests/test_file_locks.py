"""The lock on a file that a rank waits for, and who holds it, are seen."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
from pathlib import Path

import pytest

from ddpkit.watcher import file_locks


def _lock(path: Path) -> None:
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


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
            while not wanted.items() <= (found := file_locks.locked_by({})).items():
                assert all(waiter.is_alive() for waiter in waiters), found
        finally:
            fcntl.flock(held, fcntl.LOCK_UN)
    for waiter in waiters:
        waiter.join()
        assert waiter.exitcode == 0
    assert not wanted.keys() & file_locks.locked_by({}).keys()


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
        assert (file_locks.locked_by({1: [{"frames": frames}]}).get(1) == os.getpid()) == wanted
