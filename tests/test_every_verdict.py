"""Whatever the ranks left behind, in whatever combination, a verdict comes: one sentence, and ranks that the job had."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_records import GAVE_UP, PEER_LOST, write_rank, write_run
from test_standstill import ENDED, WATCHDOG, evidence

from ddpkit.runfolder import wire
from ddpkit.runfolder.ranks import Rank, read_attempts
from ddpkit.verdict.culprit import judge
from ddpkit.verdict.endings import Ending

STEP = [("all_reduce", 5), ("all_reduce", 6)]
LOOKED_AT: dict[str, dict[str, Any]] = {
    "waits": {"calls": [*STEP, ("all_reduce", 5)], "waits": True},
    "waits elsewhere": {"calls": [*STEP, ("barrier", 30)], "waits": True, "for_some": 30},
    "waits in another size": {"calls": [*STEP, ("all_reduce", 5, [8])], "waits": True},
    "waits in a group": {
        "calls": [*STEP, ("all_reduce", 31)],
        "waits": True,
        "last_within": [0, 1],
        "groups": [[0, 1]],
    },
    "waits in a group made anew": {"calls": [*STEP, ("all_reduce", 5)], "waits": True, "anew": 1},
    "waits to receive": {"calls": STEP, "waits": True, "line": 9, "peer": 0},
    "waits to receive, with no record": {"calls": [], "waits": True, "line": 9, "peer": 0},
    "waits to send once more": {
        "calls": STEP,
        "waits": True,
        "line": 9,
        "peer": 0,
        "exchanged": [(2, "send", 9, 0), (2, "send", 9, 0)],
    },
    "waits to swap with rank 1": {
        "calls": STEP,
        "waits": True,
        "line": 9,
        "peer": 1,
        "exchanged": [(2, "isend", 9, 1, 1), (2, "irecv", 9, 1, 1)],
    },
    "waits to swap with rank 0, with another tag": {
        "calls": STEP,
        "waits": True,
        "line": 9,
        "peer": 0,
        "exchanged": [(2, "isend", 9, 0, 3), (2, "irecv", 9, 0, 3)],
    },
    "waits in a collective after rounds of exchanges": {
        "calls": [*STEP, ("all_reduce", 5)],
        "waits": True,
        "exchanged": [(0, "recv", 9, 0), (1, "recv", 9, 0), (2, "recv", 9, 0)],
    },
    "waits for a key": {"calls": STEP, "waits": False, "line": 9, "source": "store.get('k')"},
    "makes a store": {"calls": STEP, "waits": False, "line": 9, "source": "TCPStore('h', 1)"},
    "sleeps": {"calls": STEP, "waits": False, "line": 9, "source": "time.sleep(9)"},
    "computes": {"calls": STEP, "waits": False, "line": 9, "busy": 1.0, "state": "running"},
    "waits for the disk": {"calls": STEP, "waits": False, "line": 9, "state": "disk-sleep"},
    "is stopped": {"calls": STEP, "waits": False, "line": 9, "state": "stopped"},
}
JOINING: dict[str, dict[str, Any]] = {
    "joins": {"master": "h:1", "world_size": 3},
    "joins elsewhere": {"master": "h:2", "world_size": 3},
    "joins another size": {"master": "h:1", "world_size": 7},
}
FAILED: dict[str, dict[str, Any]] = {
    "raised": {},
    "lost its peer": {"type": "RuntimeError", "message": PEER_LOST.format(port=1)},
    "gave up": {"type": "RuntimeError", "message": GAVE_UP},
    "met another size": {"type": "RuntimeError", "message": "op.preamble.length <= op.nbytes. 8 vs 4"},
    "missed a rank": {
        "type": "RuntimeError",
        "message": "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 2000 ms",
    },
    "found nobody": {"type": "DistBackendError", "message": "connectFullMesh failed: Connection refused"},
}
ENDINGS = {
    "failed": Ending(agent_exitcode=1),
    "hung": Ending("stall", 1, stall_s=5.0),
    "late": Ending("timeout", 1, timeout_s=9.0),
}


def palette(folder: Path) -> list[Rank]:
    """One rank for each thing that a rank can leave behind."""
    numbers = itertools.count()
    for found in LOOKED_AT.values():
        write_rank(folder, number := next(numbers), **ENDED)
        evidence(folder, number, **found)
    for asked in JOINING.values():
        write_rank(folder, number := next(numbers), **ENDED)
        evidence(folder, number, [("all_reduce", 5)], waits=False, line=3)
        own = wire.rank_folder(folder, 0, number)
        (own / wire.COLLECTIVES).unlink()
        (own / wire.STACK).write_text('Stack:\n  File "/t.py", line 3 in init_process_group\n')
        wire.write_record(own / wire.JOINING, {"at_ns": 1, "rank": -1, **asked})
    for failure in FAILED.values():
        write_rank(folder, next(numbers), dict(failure))
    write_rank(folder, next(numbers), exitcode=0)
    write_rank(folder, next(numbers), **ENDED)
    write_rank(folder, next(numbers), exitcode=-9, signal="SIGKILL")
    write_rank(folder, number := next(numbers), exitcode=-6, signal="SIGABRT")
    log = folder / wire.LOGS / "x" / "attempt_0" / str(number)
    log.mkdir(parents=True)
    (log / "stderr.log").write_text(WATCHDOG.format(seq=3, op="ALLREDUCE"))
    write_run(folder, nproc=next(numbers))
    return [replace(rank, world_size=3, master="h:1") for rank in read_attempts(folder)[0]]


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_verdict_comes_of_whatever_is_found(attempt: int, tmp_path: Path) -> None:
    """Every two ranks in both orders, and every three."""
    kinds = palette(tmp_path)
    # Read once: a rank keeps what it has read.
    numbered = [[replace(kind, rank=number, attempt=attempt) for kind in kinds] for number in range(3)]
    pairs: list[Sequence[Rank]] = list(itertools.product(*numbered[:2]))
    threes = [
        [numbered[number][kind] for number, kind in enumerate(chosen)]
        for chosen in itertools.combinations_with_replacement(range(len(kinds)), 3)
    ]
    for ranks in pairs + threes:
        for said, ending in ENDINGS.items():
            verdict = judge(ranks, ending)
            named = verdict.culprit if isinstance(verdict.culprit, tuple) else (verdict.culprit,)
            found = f"{said}: {[(r.exitcode, r.failure and r.failure.message) for r in ranks]}: {verdict}"
            assert verdict.sentence or all(r.exitcode == 0 for r in ranks), found
            assert set(named) <= {None, "every rank", "torchrun", *range(len(ranks))}, found
            assert set(verdict.words) == set(verdict.roles) == set(range(len(ranks))), found
