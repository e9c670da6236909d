"""How long a look waits for what the ranks have to say: for one that is slow to answer, and not for one that cannot."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from ddpkit.runfolder import wire
from ddpkit.runfolder.ranks import Rank
from ddpkit.watcher import look


def answering(folder: Path, after_s: float | None) -> Rank:
    """A rank that is asked through its pipe, and answers after so many seconds; never with None."""
    folder.mkdir()
    os.mkfifo(folder / wire.ASK)
    asked = os.open(folder / wire.ASK, os.O_RDWR)

    def answer() -> None:
        if os.read(asked, 1) and after_s is not None:
            time.sleep(after_s)
            wire.write_record(folder / wire.COLLECTIVES_ASKED, {"entries": []})

    threading.Thread(target=answer, daemon=True).start()
    return Rank(0, 0, 0, folder, None, pid=os.getpid())


@pytest.mark.parametrize(
    ("after_s", "unable", "heard"),
    [(0.0, False, True), (0.0, True, True), (2 * look.WITHIN_S, False, True), (None, True, False)],
    ids=["at once", "though it may be unable to", "slowly", "never"],
)
def test_an_answer_is_waited_for_where_one_may_come(
    tmp_path: Path, after_s: float | None, unable: bool, heard: bool
) -> None:
    rank = answering(tmp_path / "rank_0", after_s)
    began = time.monotonic()
    look.gather_collectives([rank], [0] if unable else [])
    assert (rank.folder / wire.COLLECTIVES_ASKED).exists() == heard
    assert time.monotonic() - began < look.ANSWERS_WITHIN_S


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    rank = answering(tmp_path / "rank_0", None)
    ended = os.fork()
    if not ended:
        os._exit(0)
    os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)
    began = time.monotonic()
    look.gather_collectives([Rank(0, 0, 0, rank.folder, None, pid=ended)], [])
    os.waitpid(ended, 0)
    assert time.monotonic() - began < look.ANSWERS_WITHIN_S
