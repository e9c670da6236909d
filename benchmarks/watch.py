"""What it costs a job to be watched, and how soon after a hang the verdict is there.

The cost, taken twice, in a silent training loop of small steps, so that the watcher asks every rank for its collectives
all the time. CPU time: what the watching thread in the kernel and the answering thread in each rank used, of what the
machine's cores could give; no other job disturbs that. Wall time: second by second the job is not watched, watched, not
watched, watched 16 times as often, and the ranks time their steps; two jobs one after the other would differ by more than
watching costs. 16 times the cost stands out from a machine's noise where the cost itself does not. The hang: one rank
stops joining, and the seconds from the last sign of life to the verdict with every rank's stack, above `stall`. `--write`
puts both into docs/watch.md.

    python benchmarks/watch.py --rounds 7 --seconds 600 --write
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
from ddpkit.watcher import progress, watcher
from ddpkit.watcher.tail import Tails
from ddpkit.watcher.watcher import Watcher

PAGE = Path(__file__).parents[1] / "docs" / "watch.md"
TRAINING = """
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

def answering_s():
    return int(open(f"/proc/self/task/{answering}/schedstat").read().split()[0]) / 1e9

for _ in range(100):
    step()
answering = next(t.native_id for t in threading.enumerate() if t.name == "ddpkit answers its watcher")
blocks, until = [], time.time() + float(sys.argv[1])
more = torch.ones(1)
while more.item():
    began = time.time()
    for _ in range(20):
        step()
    blocks.append((began, time.time(), answering_s()))
    more.fill_(time.time() < until)
    dist.broadcast(more, 0)
print(json.dumps(blocks), flush=True)
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
WINDOW_S = 1.0
# How often the job is watched, second by second, in multiples of what ddpkit does.
OFTEN = 16
DOSES = (0, 1, 0, OFTEN)
STALL_S = 3.0


@dataclass
class Window:
    """One second of the job: how often it is watched, the time of its steps, and the CPU seconds of those who watch."""

    dose: int
    looks: int = 0
    watching_s: float = 0.0
    answering_s: float = 0.0
    took_s: float = 0.0
    blocks: int = 0


class Dosed:
    """Makes a `Watcher` watch as often as each window says, and counts what that takes."""

    def __init__(self) -> None:
        self.windows: dict[int, Window] = {}
        self._wait, self._say, self._spent_s = Tails.wait, Watcher._say_how_it_is, 0.0
        self._every_s, self._ask_after_s = watcher.STATE_EVERY_S, progress.ASK_AFTER_S

    def __enter__(self) -> Dosed:
        def wait(tails: Tails, seconds: float) -> None:
            self.wait(tails, seconds)

        def say(watcher: Watcher) -> None:
            self.say(watcher)

        Tails.wait, Watcher._say_how_it_is = wait, say  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Tails.wait, Watcher._say_how_it_is = self._wait, self._say  # type: ignore[method-assign]
        watcher.STATE_EVERY_S, progress.ASK_AFTER_S = self._every_s, self._ask_after_s

    def at(self, now_s: float) -> Window:
        """The window that holds this moment."""
        number = int(now_s / WINDOW_S)
        return self.windows.setdefault(number, Window(DOSES[number % len(DOSES)]))

    def wait(self, tails: Tails, seconds: float) -> None:
        """In place of `Tails.wait`: not beyond the window, and not at all often in one that is not watched."""
        now = time.time()
        window, left_s = self.at(now), WINDOW_S - now % WINDOW_S
        window.watching_s += time.thread_time() - self._spent_s
        self._spent_s = time.thread_time()
        often = max(1, window.dose)
        watcher.STATE_EVERY_S, progress.ASK_AFTER_S = self._every_s / often, self._ask_after_s / often
        self._wait(tails, min(seconds / often, left_s) if window.dose else left_s)

    def say(self, watcher: Watcher) -> None:
        """In place of `Watcher._say_how_it_is`."""
        window = self.at(time.time())
        if window.dose:
            window.looks += 1
            self._say(watcher)


def watched_windows(folder: Path, seconds: float) -> dict[int, Window]:
    """Train on 2 ranks without a word for so many `seconds`, watched now more and now less; each whole second of it."""
    script = folder / "steps.py"
    script.write_text(TRAINING)
    with Dosed() as dosed:
        run = ddpkit.launch(script, args=[seconds], show=False).check()
    for rank in run.ranks:
        before_s = 0.0
        for began, ended, answering_s in json.loads(rank.stdout):
            window = dosed.at(began)
            window.answering_s += answering_s - before_s
            before_s = answering_s
            if rank.rank == 0 and int(began / WINDOW_S) == int(ended / WINDOW_S):
                window.took_s += ended - began
                window.blocks += 1
    # The first seconds of a job are its start.
    return {number: w for number, w in sorted(dosed.windows.items())[3:-1] if w.blocks > 5}


@dataclass(frozen=True)
class Cost:
    """What a dose of watching costs: looks a second, shares of one core, and the time of a step against unwatched ones."""

    looks: float
    watching: float
    answering: float
    ratios: list[float]

    @property
    def share(self) -> float:
        """The share of all cores' time."""
        return (self.watching + self.answering) / (os.cpu_count() or 1)

    @property
    def ratio(self) -> tuple[float, float, float]:
        """The median ratio, and the ends of its 95 % confidence interval (by rank, so that no outlier counts)."""
        ordered, n = sorted(self.ratios), len(self.ratios)
        reach = int(1.96 * n**0.5 / 2 + 1)
        return statistics.median(ordered), ordered[max(0, n // 2 - reach)], ordered[min(n - 1, n // 2 + reach)]


def cost_of(dose: int, windows: dict[int, Window]) -> Cost:
    """Each window of this `dose` against the mean of the two unwatched ones beside it: the machine drifts."""
    these = {n: w for n, w in windows.items() if w.dose == dose and {n - 1, n + 1} <= set(windows)}
    step_s = {n: w.took_s / w.blocks for n, w in windows.items()}
    ratios = [step_s[n] / ((step_s[n - 1] + step_s[n + 1]) / 2) for n in these]
    return Cost(
        statistics.mean(w.looks for w in these.values()) / WINDOW_S,
        statistics.mean(w.watching_s for w in these.values()) / WINDOW_S,
        statistics.mean(w.answering_s for w in these.values()) / WINDOW_S,
        ratios,
    )


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


def said(ratio: tuple[float, float, float]) -> str:
    """`1.002 (0.998 to 1.006)`."""
    return f"{ratio[0]:.3f} ({ratio[1]:.3f} to {ratio[2]:.3f})"


def told(once: Cost, often: Cost, after: dict[int, list[float]], rounds: int) -> str:
    """The page."""
    hangs = "\n".join(f"| {ranks} | {spread(values)} |" for ranks, values in after.items())
    versions = f"torch {metadata.version('torch')}, Python {platform.python_version()}"
    rows = "\n".join(
        f"| {name} | {c.looks:.1f} | {c.watching:.2%} | {c.answering:.2%} | {c.share:.2%} | {said(c.ratio)} |"
        for name, c in (("as ddpkit does", once), (f"{OFTEN} times as often", often))
    )
    part = once.looks / often.looks
    low, high = ((value - 1) * part for value in often.ratio[1:])
    return f"""# What it costs to be watched

Measured by `benchmarks/watch.py` on {time.strftime("%Y-%m-%d")}: {os.cpu_count()} cores, {versions}.

A training loop of small steps on 2 ranks prints nothing, so the watcher asks each rank for its collectives all the time.
In turn, each for one second, the loop is not watched, watched, not watched, and watched {OFTEN} times as often. CPU time is that
of the kernel's thread that watches and of the ranks' threads that answer; other work on the machine does not affect it. A
step's time is the ratio of a watched second to the mean of the unwatched seconds before and after it: median and 95 %
confidence interval of {len(once.ratios)} and {len(often.ratios)} such pairs.

| watched | looks per second | watcher, of a core | ranks, of a core | both, of all {os.cpu_count()} cores | a step's time |
|---|---|---|---|---|---|
{rows}

The cost of one look follows from the second row: watching as ddpkit does lengthens a step by
**{(often.ratio[0] - 1) * part:.2%}** ({low:.2%} to {high:.2%}).

## From a hang to its verdict

Rank 1 stops joining; {rounds} rounds. Seconds beyond `stall` ({STALL_S:g} s) from the last line of any rank to the verdict,
with every rank's stack and collectives.

| ranks | seconds beyond `stall` |
|---|---|
{hangs}
"""


def main() -> None:
    """Measure, print the page, and write it if asked to."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--seconds", type=float, default=600)
    options.add_argument("--write", action="store_true")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DDPKIT_HOME"] = folder
        hang = Path(folder) / "hang.py"
        hang.write_text(HANG)
        # The first launch of a process is cold, and torch may take longer than the stall to come from the disk.
        ddpkit.launch(lambda: None, nproc=max(RANKS), show=False, timeout=120)
        after = {ranks: [verdict_after_s(hang, ranks) for _ in range(asked.rounds)] for ranks in RANKS}
        windows = watched_windows(Path(folder), asked.seconds)
    page = told(cost_of(1, windows), cost_of(OFTEN, windows), after, asked.rounds)
    print(page)
    if asked.write:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
