"""Injected faults at random moments with 2 and 4 ranks, and kills from outside: `make soak` writes docs/training.md."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pytest
from conftest import wait_for
from survival import EVERY, FAULTS, Fault, Outcome, lost, outcome, resumed_from, trained, undisturbed

import ddpkit
from ddpkit.rank.trainer.faults import KINDS
from ddpkit.runfolder import wire

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

SEED = os.environ.get("SOAK_SEED", time.strftime("%Y%m%d"))
MOMENTS = int(os.environ.get("SOAK_MOMENTS", "3"))
KILLS = int(os.environ.get("SOAK_KILLS", "50"))
PAGE = Path(__file__).parents[1] / "docs" / "training.md"
KILLS_HERE = "<!-- kills -->"
ENDS = {"goes on": "goes on", "restarts": "ends at once, starts again", "refused": "refused before the first step"}


@dataclass
class Row:
    """What became of one kind of fault."""

    seconds: list[float] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, found: Outcome, usual_s: float, moment: str) -> None:
        self.seconds.append(found.seconds - usual_s)
        self.again.append(found.steps_again)
        if found.wrong:
            self.wrong.append(f"{moment}: {found.wrong}")


def moments(fault: Fault, nproc: int, drawn: random.Random) -> list[tuple[int, int]]:
    """Ranks and steps at which `fault` strikes: in the second half of an epoch a worker has nothing more to load."""
    steps = {2: 36, 4: 18}[nproc]
    ranks = [drawn.randrange(nproc) for _ in range(MOMENTS)]
    first, last = {"torn": (EVERY + 1, steps), "worker": (0, steps // 4), "slow": (0, steps // 2)}.get(
        fault.kind, (0, steps)
    )
    return [(rank, drawn.randrange(first, last)) for rank in ranks]


@pytest.mark.parametrize("nproc", [2, 4])
def test_every_fault_at_random_moments(home: Path, nproc: int) -> None:
    drawn = random.Random(f"{SEED} {nproc}")
    rows: dict[str, Row] = {kind: Row() for kind in FAULTS}
    usual_s = _usual_s(home, nproc)
    for kind, fault in FAULTS.items():
        for rank, step in moments(fault, nproc, drawn):
            rows[kind].add(outcome(home, fault, rank, step, nproc), usual_s, f"rank {rank}, step {step}")
    _write(f"<!-- faults {nproc} -->", _table(rows, nproc))
    assert not [each for row in rows.values() for each in row.wrong]


def test_kills_from_outside_at_random_moments(home: Path) -> None:
    drawn = random.Random(SEED)
    wanted = undisturbed(home / "undisturbed", 2)
    wrong, struck, again = [], 0, []
    for number in range(KILLS):
        own = home / f"kill_{number}"
        run, rank = trained(own, 2, 1, wait=False), drawn.randrange(2)
        if _killed(run, rank, drawn.uniform(0, 1.5)):
            struck += 1
        run.wait(240)
        if not run.ok or (bad := lost(own, run, FAULTS["slow"], 0, wanted)):
            wrong.append(f"kill {number} of rank {rank}: {run.state} {bad if run.ok else run}")
        elif len(run.attempts) == 2:
            again.append(resumed_from(run))
    text = (
        f"{KILLS} jobs on 2 ranks; in each, one rank was killed from outside (SIGKILL) at a random moment. {struck} were hit "
        f"while they ran, and {len(again)} restarted and resumed after {_spread(again)} of 36 steps. "
        f"Wrong at the end: {len(wrong)}. In all other jobs, every parameter equals that of the undisturbed job bit for bit."
    )
    _write(KILLS_HERE, text)
    assert not wrong


def _usual_s(home: Path, nproc: int) -> float:
    """Seconds of a run that nothing happens to: the middle of three."""
    taken = []
    for number in range(3):
        since = time.monotonic()
        assert trained(home / f"usual_{nproc}_{number}", nproc, 0).ok
        taken.append(time.monotonic() - since)
    return median(taken)


def _killed(run: ddpkit.Run, rank: int, after_s: float) -> bool:
    """Kill `rank` of `run` so many seconds after its process group is up; whether it was still there."""
    wait_for(lambda: run.state != "running" or " is up: " in (run.ranks[0].stdout if run.ranks else ""), 120)
    time.sleep(after_s)
    record = wire.read_record(wire.rank_folder(run.folder, 0, rank) / wire.STARTED)
    with contextlib.suppress(ProcessLookupError):
        if record and run.state == "running":
            os.kill(record["pid"], signal.SIGKILL)
            return True
    return False


def _table(rows: dict[str, Row], nproc: int) -> str:
    lines = [
        f"{nproc} ranks, {MOMENTS} random moments each:",
        "",
        "| fault | the job | right | steps repeated | seconds lost |",
        "|---|---|---|---|---|",
    ]
    for kind, row in rows.items():
        right = f"{len(row.seconds) - len(row.wrong)} of {len(row.seconds)}"
        fault = FAULTS[kind]
        costs = _spread(row.again) if fault.ends == "restarts" else "–"
        lines.append(f"| {KINDS[kind]} | {ENDS[fault.ends]} | {right} | {costs} | {_spread(row.seconds)} |")
    return "\n".join(lines)


def _spread(values: list[float] | list[int]) -> str:
    """The middle value, and the smallest and largest."""
    if not values:
        return "–"
    whole = isinstance(values[0], int)
    shown = [f"{v:.0f}" if whole else f"{v:.1f}" for v in (median(values), min(values), max(values))]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


def _write(marker: str, text: str) -> None:
    """Put `text` into docs/training.md in the place of `marker`."""
    before, mark, rest = PAGE.read_text(encoding="utf-8").partition(marker)
    _, end, after = rest.partition("<!-- end -->")
    PAGE.write_text(f"{before}{mark}\n\n{text}\n\n{end}{after}", encoding="utf-8")
