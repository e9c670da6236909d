"""What it costs a job to be watched, and how soon after a hang the verdict is there.

The cost, taken twice, in a silent training loop of small steps, so that the watcher asks every rank for its collectives
all the time. CPU time: what the watching thread in the kernel and the answering thread in each rank used, of what the
machine's cores could give; no other job disturbs that. Wall time: for two seconds the job is watched, for two it is not,
and the ranks time their steps; two jobs one after the other would differ by more than watching costs. The hang: one rank
stops joining, and the seconds from the last sign of life to the verdict with every rank's stack, above `stall`. `--write`
puts both into docs/watch.md.

    python benchmarks/watch.py --rounds 7 --seconds 120 --write
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import ddpkit
from ddpkit.watch import Watcher

PAGE = Path(__file__).parents[1] / "docs" / "watch.md"
STEPS = """
import json, sys, threading, time
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
blocks, until = [], time.time() + float(sys.argv[1])
more = torch.ones(1)
while more.item():
    began = time.time()
    for _ in range(50):
        step()
    blocks.append((began, time.time()))
    more.fill_(time.time() < until)
    dist.broadcast(more, 0)
answering = [t.native_id for t in threading.enumerate() if t.name == "ddpkit answers its watcher"]
cpu_s = sum(int(open(f"/proc/self/task/{thread}/schedstat").read().split()[0]) for thread in answering) / 1e9
print(json.dumps({"blocks": blocks, "cpu_s": cpu_s}), flush=True)
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
WINDOW_S = 2.0
STALL_S = 3.0


@dataclass(frozen=True)
class Cost:
    """Microseconds a step in each watched window, and beside it; the shares of one core that watching and answering took."""

    on: list[float]
    off: list[float]
    watching: float
    answering: list[float]

    @property
    def share(self) -> float:
        """The share of all cores' time."""
        return (self.watching + sum(self.answering)) / (os.cpu_count() or 1)


def costs(folder: Path, seconds: float) -> Cost:
    """Watch 2 ranks of a silent training loop for half of the `seconds`, window by window."""
    script = folder / "steps.py"
    script.write_text(STEPS)
    always = Watcher._say_how_it_is
    watching_s = []

    def now_and_then(watcher: Watcher) -> None:
        if watched(time.time()):
            before_s = time.thread_time()
            always(watcher)
            watching_s.append(time.thread_time() - before_s)

    Watcher._say_how_it_is = now_and_then  # type: ignore[method-assign]
    run = ddpkit.launch(script, args=[seconds], show=False).check()
    told = [json.loads(rank.stdout) for rank in run.ranks]
    windows: dict[int, list[float]] = {}
    for began, ended in told[0]["blocks"]:
        if int(began / WINDOW_S) == int(ended / WINDOW_S):
            windows.setdefault(int(began / WINDOW_S), []).append((ended - began) / 50 * 1e6)
    medians = {number: statistics.median(each) for number, each in windows.items()}
    pairs = [n for n in medians if watched(n * WINDOW_S) and n - 1 in medians and n + 1 in medians]
    # The machine drifts: each watched window stands against the mean of the two beside it.
    on, off = [medians[n] for n in pairs], [(medians[n - 1] + medians[n + 1]) / 2 for n in pairs]
    watched_s = WINDOW_S * sum(watched(n * WINDOW_S) for n in windows)
    return Cost(on, off, sum(watching_s) / watched_s, [t["cpu_s"] / watched_s for t in told])


def watched(at_s: float) -> bool:
    """Whether the job is watched in the window that holds this moment."""
    return int(at_s / WINDOW_S) % 2 == 0


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


def told(cost: Cost, after: dict[int, list[float]], rounds: int) -> str:
    """The page."""
    ratios = [watching / alone for watching, alone in zip(cost.on, cost.off, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    hangs = "\n".join(f"| {ranks} | {spread(values)} |" for ranks, values in after.items())
    versions = f"torch {metadata.version('torch')}, Python {platform.python_version()}"
    return f"""# What it costs to be watched

Measured by `benchmarks/watch.py` on {time.strftime("%Y-%m-%d")}: {os.cpu_count()} cores, {versions}.

A training loop of small steps on 2 ranks that prints nothing, so that the watcher asks each rank for its collectives all
the time. CPU time, as a share of what the cores can give:

| who | share of one core |
|---|---|
| the thread in the kernel that watches | {cost.watching:.2%} |
| the thread in each rank that answers | {" and ".join(f"{share:.2%}" for share in cost.answering)} |
| together, of all {os.cpu_count()} cores | **{cost.share:.2%}** |

Wall time: for {WINDOW_S:g} s it watches, for {WINDOW_S:g} s it does not; microseconds a step, the median window with the
least and the most.

| windows | microseconds a step |
|---|---|
| watched, {len(cost.on)} | {spread(cost.on, 0)} |
| not watched, beside them | {spread(cost.off, 0)} |

Each watched window against the mean of the two beside it: the median ratio is {middle:.4f}, the middle half lies between
{low:.4f} and {high:.4f}, which is how steady this machine is.

## From a hang to its verdict

Rank 1 stops joining; {rounds} rounds. Seconds above `stall` ({STALL_S:g} s) from the last line of any rank to the verdict,
with every rank's stack and collectives.

| ranks | seconds above `stall` |
|---|---|
{hangs}
"""


def main() -> None:
    """Measure, print the page, and write it if asked to."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--seconds", type=float, default=120)
    options.add_argument("--write", action="store_true")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DDPKIT_HOME"] = folder
        hang = Path(folder) / "hang.py"
        hang.write_text(HANG)
        after = {ranks: [verdict_after_s(hang, ranks) for _ in range(asked.rounds)] for ranks in RANKS}
        cost = costs(Path(folder), asked.seconds)
    page = told(cost, after, asked.rounds)
    print(page)
    if asked.write:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
