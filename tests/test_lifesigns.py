"""How busy a rank was, from two points of what its process has used, however long ago the first was and whoever had the cores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddpkit.runfolder.ranks import Rank
from ddpkit.watcher import progress


def test_a_look_that_took_long_leaves_two_points_to_tell_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, used = [100.0], [5.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(progress, "_cpu_s", lambda _pid: used[0])
    monkeypatch.setattr(progress, "_ready_s", lambda _pid: 0.0)
    monkeypatch.setattr(progress, "ask", lambda *_: None)
    rank = Rank(0, 0, 0, tmp_path, None, pid=os.getpid())
    followed = progress.Progress()
    for _ in range(8):
        followed.update([rank])
        clock[0], used[0] = clock[0] + 0.25, used[0] + 0.25
    clock[0], used[0] = clock[0] + 4 * progress.LATELY_S, used[0] + 4 * progress.LATELY_S
    followed.update([rank])
    assert followed.busy(rank) == pytest.approx(1.0)
    clock[0] += progress.LATELY_S
    followed.update([rank])
    clock[0] += 0.25
    followed.update([rank])
    assert followed.busy(rank) == pytest.approx(0.0)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not tell who waits for a core")
def test_a_rank_that_gets_little_of_a_crowded_machine_is_busy_all_the_same(tmp_path: Path) -> None:
    """A tenth of a core is what one of many that compute gets; a rank that waits for its peers wants none."""
    core = sorted(os.sched_getaffinity(0))[0]
    one_core = [sys.executable, "-c", f"import os, time; os.sched_setaffinity(0, [{core}])\nwhile True: os.getpid()"]
    crowd = [subprocess.Popen(one_core) for _ in range(10)]
    try:
        rank = Rank(0, 0, 0, tmp_path, None, pid=crowd[0].pid)
        followed = progress.Progress()
        for _ in range(20):
            time.sleep(0.2)
            followed.update([rank])
            if followed.busy(rank) > 0.6:
                break
        assert followed.busy(rank) > 0.6
    finally:
        for each in crowd:
            each.kill()
            each.wait()
