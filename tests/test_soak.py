"""Hundreds of launches, every fault at a random moment: the run is truthful each time, and nothing is ever left behind.

`make soak` runs it and rewrites docs/soak.md: first every fault at random moments, launches cold and warm in turn; then
warm launches in a row, a fifth of them with a fault, and what they leave open; then every failure of the matrix again and
again. SOAK_LAUNCHES (260), SOAK_IN_A_ROW (500), SOAK_MATRIX (10) and SOAK_SEED (today's date) choose how much and which.
"""

from __future__ import annotations

import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from conftest import left_after, process_of
from jobs import jobs, launched, untrue

import ddpkit
from ddpkit.processes import zygote
from ddpkit.runfolder import wire

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

SEED = os.environ.get("SOAK_SEED", time.strftime("%Y%m%d"))
REPORT = Path(__file__).parents[1] / "docs" / "soak.md"
STEPS = """
import ctypes, os, signal, sys, time
import torch, torch.distributed as dist
from ddpkit.rank import setup

deed, at, guilty = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with setup() as here:
    for step in range(60):
        if step == at and here.rank == guilty:
            if deed == "raises": raise ValueError(f"at step {step}")
            if deed == "is killed": os.kill(os.getpid(), signal.SIGKILL)
            if deed == "segfaults": ctypes.string_at(0)
            if deed == "aborts": ctypes.CDLL(None).abort()
            if deed == "exits with 3": os._exit(3)
            if deed == "leaves early": break
        if step == at and deed == "all raise": raise RuntimeError("alike")
        dist.all_reduce(torch.ones(1000))
        print("step", step, flush=True)
        time.sleep(0.01)
"""
# What a rank does to itself, with the culprit that must be named; "all raise" has none that is first.
BY_THE_RANK = ("raises", "is killed", "segfaults", "aborts", "exits with 3", "leaves early", "all raise", "nothing")
# What is done to the job from outside, at a random moment from its very start.
FROM_OUTSIDE = (
    *("stopped", "agent killed", "agent's keeper killed", "rank's keeper killed", "launching process killed"),
    *("client killed", "zygote killed"),
)
FAULTS = BY_THE_RANK + FROM_OUTSIDE
# Which process of the job is killed, by a word of its command line.
VICTIMS = {
    "agent killed": "torch.distributed.run",
    "agent's keeper killed": "keeper.py agent",
    "rank's keeper killed": "keeper.py rank",
    "client killed": wire.CLIENT,
}


@dataclass
class Tally:
    """What became of one kind of fault."""

    launches: int = 0
    wrong: list[str] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)
    warm_s: list[float] = field(default_factory=list)

    def add(self, deed: Callable[[], str], home: Path, warm: bool) -> None:
        """Do `deed`, which says what is wrong with its run, or ""."""
        self.launches += 1
        before = time.monotonic()
        wrong = deed()
        (self.warm_s if warm else self.cold_s).append(time.monotonic() - before)
        left = left_after(home, 10)
        if wrong or left:
            self.wrong.append(f"{wrong} {left or ''}")
            # The report comes at the end of an hour.
            print(self.wrong[-1], file=sys.__stderr__, flush=True)


@pytest.fixture(scope="module")
def report() -> Iterator[list[str]]:
    """Lines for docs/soak.md, written at the end."""
    versions = f"torch {metadata.version('torch')}, Python {platform.python_version()}, {os.cpu_count()} cores"
    lines = [
        "# Soak: every fault at random moments",
        "",
        f"Written by `make soak` on {time.strftime('%Y-%m-%d')}, seed {SEED}, {versions}. A run is wrong when its state or its "
        "culprit is not what was done to it, or when any process of it lives 10 s later. Seconds are the whole job, "
        "median and most, on a shared machine.",
    ]
    yield lines
    REPORT.write_text("\n".join(lines).rstrip() + "\n")


def test_every_fault_cold_and_warm(
    home: Path, script: Callable[..., str], report: list[str], monkeypatch: pytest.MonkeyPatch, warm_process: None
) -> None:
    chance = random.Random(SEED)
    path = script(STEPS)
    tallies = {deed: Tally() for deed in FAULTS}
    launches = int(os.environ.get("SOAK_LAUNCHES", "260"))
    began = time.monotonic()
    for number in range(launches):
        deed, warm = FAULTS[number // 2 % len(FAULTS)], bool(number % 2)
        monkeypatch.setenv(wire.ENV_WARM, str(int(warm)))
        tallies[deed].add(lambda deed=deed: do(path, deed, chance), home, warm)
    minutes = (time.monotonic() - began) / 60
    report += ["", f"## {launches} launches of 2 ranks, cold and warm in turn, in {minutes:.0f} minutes", ""]
    report += table(tallies)
    assert not [w for t in tallies.values() for w in t.wrong]


def test_warm_launches_in_a_row_leave_nothing(
    home: Path, script: Callable[..., str], report: list[str], monkeypatch: pytest.MonkeyPatch, warm_process: None
) -> None:
    monkeypatch.setenv(wire.ENV_WARM, "1")
    monkeypatch.setenv(wire.ENV_KEEP_RUNS, "40")
    chance = random.Random(SEED)
    path = script(STEPS)
    tallies = {deed: Tally() for deed in FAULTS}
    tallies["nothing"].add(lambda: do(path, "nothing", chance), home, warm=True)
    before, began = held(home), time.monotonic()
    launches = int(os.environ.get("SOAK_IN_A_ROW", "500"))
    for number in range(launches):
        deed = FAULTS[number // 5 % len(FAULTS)] if number % 5 == 4 else "nothing"
        tallies[deed].add(lambda deed=deed: do(path, deed, chance), home, warm=True)
    after = held(home)
    report += ["", f"## {launches} warm launches in a row in {(time.monotonic() - began) / 60:.0f} minutes", ""]
    report += [*table(tallies), "", "| held open | before | after |", "|---|---|---|"]
    report += [f"| {what} | {count} | {after[what]} |" for what, count in before.items()]
    assert not [w for t in tallies.values() for w in t.wrong]
    assert after["run folders"] <= 40
    assert all(after[what] <= before[what] + spare for what, spare in SPARE.items()), (before, after)


def test_every_failure_of_the_matrix_again_and_again(home: Path, report: list[str], warm_process: None) -> None:
    rounds, began = int(os.environ.get("SOAK_MATRIX", "10")), time.monotonic()
    matrix = [job for job in jobs() if job.family != "labs"]
    tallies = {job.name: Tally() for job in matrix}
    for _ in range(rounds):
        for job in matrix:
            tallies[job.name].add(lambda job=job: untrue(job, launched(job, home)), home, warm=True)
    minutes = (time.monotonic() - began) / 60
    report += ["", f"## {len(matrix)} failures of the matrix, {rounds} times in a row, in {minutes:.0f} minutes", ""]
    report += table(tallies)
    assert not [w for t in tallies.values() for w in t.wrong]


# What may be there once more at one moment than at another: a keeper that has not been reaped yet, an unread event.
SPARE = {
    "descriptors of this process": 2,
    "descriptors of the zygote": 1,
    "children of the zygote": 2,
    "shared memory files": 0,
}


def held(home: Path) -> dict[str, int]:
    """What launches could leave behind, counted."""
    assert zygote._current is not None
    warm = psutil.Process(zygote._current.pid)
    return {
        "descriptors of this process": psutil.Process().num_fds(),
        "threads of this process": psutil.Process().num_threads(),
        "descriptors of the zygote": warm.num_fds(),
        "children of the zygote": len(warm.children()),
        "shared memory files": len(os.listdir("/dev/shm")),
        "folders of zygotes": len(list(Path(tempfile.gettempdir()).glob("ddpkit-*"))),
        "run folders": len(list(home.glob(".ddpkit/runs/*"))),
    }


def do(path: str, deed: str, chance: random.Random) -> str:
    """Launch a job to which `deed` is done; what is wrong with its run, or ""."""
    return by_the_rank(path, deed, chance) if deed in BY_THE_RANK else from_outside(path, deed, chance)


def by_the_rank(path: str, deed: str, chance: random.Random) -> str:
    """Launch a job whose rank does `deed` at a random step; what is wrong with the run, or ""."""
    guilty = chance.randrange(2)
    run = ddpkit.launch(path, args=[deed, chance.randrange(50), guilty], show=False, timeout=120)
    expected: object = {"all raise": "every rank", "nothing": None}.get(deed, guilty)
    state = "passed" if deed == "nothing" else "failed"
    return "" if (run.state, run.culprit) == (state, expected) else f"expected {expected}, got {run}"


def from_outside(path: str, deed: str, chance: random.Random) -> str:
    """Launch a job and do `deed` to it after a random time; what is wrong with the run, or ""."""
    delay = chance.uniform(0, 1.5 if os.environ.get(wire.ENV_WARM) != "0" else 4)
    if deed == "launching process killed":
        return kill_the_launching_process(path, delay)
    run = ddpkit.launch(path, args=["nothing", 0, 0], show=False, timeout=120, wait=False)
    run.wait(delay)
    if deed == "stopped":
        run.stop()
        return "" if run.state in ("stopped", "passed") else str(run)
    if deed == "zygote killed":
        if zygote._current is not None:
            os.kill(zygote._current.pid, signal.SIGKILL)
        return "" if run.wait(60).state == "passed" else str(run)
    try:
        without = "\0" if wire.KEEPER_FILE in VICTIMS[deed] else wire.KEEPER_FILE
        process_of(run, VICTIMS[deed], without).kill()
    except (LookupError, psutil.Error):
        pass  # not there yet, or not there any more
    run.wait(60)
    return "" if run.state in ("failed", "passed") else f"{run.state}: {run}"


def kill_the_launching_process(path: str, delay: float) -> str:
    code = f"import ddpkit; ddpkit.launch({path!r}, args=['nothing', 0, 0], show=False)"
    launching = subprocess.Popen([sys.executable, "-c", code])
    try:
        launching.wait(delay)
    except subprocess.TimeoutExpired:
        launching.send_signal(signal.SIGKILL)
    launching.wait()
    return ""


def table(tallies: dict[str, Tally]) -> list[str]:
    """Launches, untruthful runs and leftovers by kind of fault."""
    rows = [
        f"| {deed} | {t.launches} | {len(t.wrong)} | {seconds(t.cold_s)} | {seconds(t.warm_s)} |"
        for deed, t in tallies.items()
    ]
    wrong = [f"- {deed}: {w}" for deed, t in tallies.items() for w in t.wrong]
    return [
        "| what was done | launches | wrong | seconds cold | seconds warm |",
        "|---|---|---|---|---|",
        *rows,
        *(["", *wrong] if wrong else []),
    ]


def seconds(values: list[float]) -> str:
    """`1.2 (3.4)`: median and most."""
    return f"{sorted(values)[len(values) // 2]:.1f} ({max(values):.1f})" if values else ""
