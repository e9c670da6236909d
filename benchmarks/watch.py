"""What it costs a job to be watched, and how soon after a hang the verdict is there.

The cost: a silent training loop of small steps, so that the watcher asks every rank for its collectives all the time,
under plain torchrun and under `ddpkit.launch`, in turn; each rank times its own steps. The hang: one rank stops joining,
and the seconds from its last sign of life to the verdict with every rank's stack, above `stall`. `--write` puts both into
docs/watch.md.

    python benchmarks/watch.py --rounds 7 --write
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import ddpkit

PAGE = Path(__file__).parents[1] / "docs" / "watch.md"
STEPS = """
import sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
net = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
batch = torch.randn(64, 256)

def step():
    optimizer.zero_grad()
    net(batch).square().mean().backward()
    optimizer.step()

for _ in range(100):
    step()
steps, began = 0, time.perf_counter()
until = began + float(sys.argv[1])
more = torch.ones(1)
while more.item():
    for _ in range(50):
        step()
    steps += 50
    more.fill_(time.perf_counter() < until)
    dist.broadcast(more, 0)
print("STEP_US", 1e6 * (time.perf_counter() - began) / steps, flush=True)
"""
HANG = """
import time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("LAST", time.time_ns(), flush=True)
if dist.get_rank() == 1:
    time.sleep(1000)
dist.all_reduce(torch.ones(1))
"""
RANKS = (2, 4, 8)
STALL_S = 3.0


def step_us(out: str) -> float:
    """The slowest rank's microseconds a step."""
    return max(float(line.split()[-1]) for line in out.splitlines() if "STEP_US" in line)


def costs(folder: Path, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Microseconds a step of 2 ranks, plain and watched, in turn."""
    script = folder / "steps.py"
    script.write_text(STEPS)
    plain = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found: dict[str, list[float]] = {"torchrun": [], "ddpkit.launch": []}

    def by_torchrun() -> float:
        done = subprocess.run([*plain, str(script), str(seconds)], capture_output=True, text=True, check=True)
        return step_us(done.stdout)

    def by_ddpkit() -> float:
        run = ddpkit.launch(script, args=[seconds], show=False, warm=False).check()
        return step_us("\n".join(rank.stdout for rank in run.ranks))

    ways = [("torchrun", by_torchrun), ("ddpkit.launch", by_ddpkit)]
    for number in range(rounds):
        for name, way in ways if number % 2 else reversed(ways):
            found[name].append(way())
    return found


def verdict_after_s(script: Path, ranks: int) -> float:
    """Seconds above `stall` from the last rank's last line to the verdict, with the stack of every rank."""
    run = ddpkit.launch(script, nproc=ranks, show=False, wait=False, stall=STALL_S, timeout=120)
    while not (len(run.ranks) == ranks and all(rank.look for rank in run.ranks)):
        if run.state != "running":
            raise SystemExit(f"the job ended before it was looked at: {run}")
        time.sleep(0.01)
    told_ns = time.time_ns()
    last_ns = max(int(rank.stdout.split()[-1]) for rank in run.ranks)
    run.stop()
    if run.culprit != 1 or not all(rank.stack for rank in run.ranks):
        raise SystemExit(f"not the truth: {run}")
    return (told_ns - last_ns) / 1e9 - STALL_S


def spread(values: list[float], digits: int = 2) -> str:
    """`0.52 (0.49 to 0.61)`: median, least and most."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def told(found: dict[str, list[float]], after: dict[int, list[float]], rounds: int, seconds: float) -> str:
    """The page."""
    ratios = [w / p for w, p in zip(found["ddpkit.launch"], found["torchrun"], strict=True)]
    medians = {name: statistics.median(values) for name, values in found.items()}
    cost = 100 * (medians["ddpkit.launch"] / medians["torchrun"] - 1)
    rows = "\n".join(f"| {name} | {spread(values, 0)} |" for name, values in found.items())
    hangs = "\n".join(f"| {ranks} | {spread(values)} |" for ranks, values in after.items())
    versions = f"torch {metadata.version('torch')}, Python {platform.python_version()}"
    return f"""# What it costs to be watched

Measured by `benchmarks/watch.py` on {time.strftime("%Y-%m-%d")}: {rounds} rounds, {os.cpu_count()} cores, {versions}.
Medians, with the least and the most.

A training loop of small steps on 2 ranks that prints nothing for {seconds:g} s, so that the watcher asks each rank for its
collectives all the time; the ways took turns. The difference of the medians is {cost:+.1f} %; pair by pair the ratio was
{spread(ratios, 3)}.

| started by | microseconds a step |
|---|---|
{rows}

## From a hang to its verdict

Rank 1 stops joining. Seconds above `stall` ({STALL_S:g} s) from the last line of any rank to the verdict, with every
rank's stack and collectives.

| ranks | seconds above `stall` |
|---|---|
{hangs}
"""


def main() -> None:
    """Measure, print the page, and write it if asked to."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--seconds", type=float, default=15)
    options.add_argument("--write", action="store_true")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DDPKIT_HOME"] = folder
        hang = Path(folder) / "hang.py"
        hang.write_text(HANG)
        after = {ranks: [verdict_after_s(hang, ranks) for _ in range(asked.rounds)] for ranks in RANKS}
        found = costs(Path(folder), asked.rounds, asked.seconds)
    page = told(found, after, asked.rounds, asked.seconds)
    print(page)
    if asked.write:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
