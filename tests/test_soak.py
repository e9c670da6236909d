"""Hundreds of launches, every fault at a random moment: the run is truthful each time, and nothing is ever left behind.

`make soak` runs it and rewrites docs/soak.md. SOAK_LAUNCHES (300) and SOAK_SEED (today's date) choose how much and which.
"""

from __future__ import annotations

import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from conftest import living

import ddpkit
from ddpkit import wire

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

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
FROM_OUTSIDE = ("stopped", "agent killed", "agent's keeper killed", "rank's keeper killed", "launching process killed")


@dataclass
class Tally:
    """What became of one kind of fault."""

    launches: int = 0
    wrong: list[str] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)


def test_soak(home: Path, script: Callable[..., str]) -> None:
    seed = os.environ.get("SOAK_SEED", time.strftime("%Y%m%d"))
    chance = random.Random(seed)
    path = script(STEPS)
    tallies: dict[str, Tally] = defaultdict(Tally)
    began = time.monotonic()
    for number in range(int(os.environ.get("SOAK_LAUNCHES", "300"))):
        deed = (BY_THE_RANK + FROM_OUTSIDE)[number % (len(BY_THE_RANK) + len(FROM_OUTSIDE))]
        before = time.monotonic()
        wrong = by_the_rank(path, deed, chance) if deed in BY_THE_RANK else from_outside(path, deed, chance)
        tally = tallies[deed]
        tally.launches += 1
        tally.back_s.append(time.monotonic() - before)
        left = left_after(home, 10)
        if wrong or left:
            tally.wrong.append(f"launch {number}: {wrong} {left or ''}")
    write_report(tallies, seed, time.monotonic() - began)
    assert not [w for t in tallies.values() for w in t.wrong]


def by_the_rank(path: str, deed: str, chance: random.Random) -> str:
    """Launch a job whose rank does `deed` at a random step; what is wrong with the run, or ""."""
    guilty = chance.randrange(2)
    run = ddpkit.launch(path, args=[deed, chance.randrange(50), guilty], show=False, timeout=120)
    expected: object = {"all raise": "every rank", "nothing": None}.get(deed, guilty)
    state = "passed" if deed == "nothing" else "failed"
    return "" if (run.state, run.culprit) == (state, expected) else f"expected {expected}, got {run}"


def from_outside(path: str, deed: str, chance: random.Random) -> str:
    """Launch a job and do `deed` to it after a random time; what is wrong with the run, or ""."""
    delay = chance.uniform(0, 5)
    if deed == "launching process killed":
        return kill_the_launching_process(path, delay)
    run = ddpkit.launch(path, args=["nothing", 0, 0], show=False, timeout=120, wait=False)
    run.wait(delay)
    if deed == "stopped":
        run.stop()
        return "" if run.state in ("stopped", "passed") else str(run)
    victim = find(
        run.folder,
        {"agent killed": "torch.distributed.run", "agent's keeper killed": "keeper.py agent"}.get(
            deed, "keeper.py rank"
        ),
    )
    if victim is not None:
        victim.kill()
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


def find(folder: Path, words: str) -> psutil.Process | None:
    """A process of the job in `folder` whose command line holds `words`."""
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            # The agent's keeper has the agent's whole command line behind its own.
            is_it = words in line and (wire.KEEPER_FILE in words) == (wire.KEEPER_FILE in line)
            if is_it and process.environ().get(wire.ENV_RUN) == str(folder):
                return process
        except psutil.Error:
            continue
    return None


def left_after(home: Path, seconds: float) -> list[str]:
    """Processes of any job still alive `seconds` from now; none of them a moment earlier is enough."""
    until = time.monotonic() + seconds
    while (left := living(home)) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def write_report(tallies: dict[str, Tally], seed: str, seconds: float) -> None:
    """docs/soak.md: launches, untruthful runs and leftovers by kind of fault."""
    launches = sum(t.launches for t in tallies.values())
    wrong = [w for t in tallies.values() for w in t.wrong]
    rows = [
        f"| {deed} | {t.launches} | {len(t.wrong)} | {sorted(t.back_s)[len(t.back_s) // 2]:.1f} ({max(t.back_s):.1f}) |"
        for deed, t in tallies.items()
    ]
    versions = f"torch {metadata.version('torch')}, Python {platform.python_version()}, {os.cpu_count()} cores"
    lines = [
        "# Soak: every fault at random moments",
        "",
        f"Written by `make soak` on {time.strftime('%Y-%m-%d')}: {launches} launches of 2 ranks in "
        f"{seconds / 60:.0f} minutes, seed {seed}, {versions}. A run is wrong when its state or its culprit is not "
        "what was done to it, or when any process of it lives 10 s later. Seconds are the whole job, median and most, "
        "on a shared machine.",
        "",
        "| what was done | launches | wrong | seconds |",
        "|---|---|---|---|",
        *rows,
        "",
        *(f"- {w}" for w in wrong),
    ]
    REPORT.write_text("\n".join(lines).rstrip() + "\n")
