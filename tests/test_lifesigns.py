"""How busy a rank was, from two points of what its process has used, however long ago the first was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddpkit import lifesigns
from ddpkit.records import Rank


def test_a_look_that_took_long_leaves_two_points_to_tell_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, used = [100.0], [5.0]
    monkeypatch.setattr(lifesigns.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(lifesigns, "_cpu_s", lambda _pid: used[0])
    monkeypatch.setattr(lifesigns, "ask", lambda *_: None)
    rank = Rank(0, 0, 0, tmp_path, None, pid=os.getpid())
    progress = lifesigns.Progress()
    for _ in range(8):
        progress.update([rank])
        clock[0], used[0] = clock[0] + 0.25, used[0] + 0.25
    clock[0], used[0] = clock[0] + 4 * lifesigns.LATELY_S, used[0] + 4 * lifesigns.LATELY_S
    progress.update([rank])
    assert progress.busy(rank) == pytest.approx(1.0)
    clock[0] += lifesigns.LATELY_S
    progress.update([rank])
    clock[0] += 0.25
    progress.update([rank])
    assert progress.busy(rank) == pytest.approx(0.0)
