"""What the training kit costs: the same step of DDP, bare and with a part of the kit, side by side in one job of 2 ranks.

Every way of stepping in `WAYS` has a model of its own. A round lets each take `--steps` steps in turn, and begins with another
one each time, so that the machine's drift falls on all alike. A way is held against the bare loop of the same round: median
over the rounds, and its 95 % confidence interval. One of the ways is the bare loop once more: what is said of it is noise.
CPU time is that of all threads of rank 0, which no other work on the machine disturbs. `--write` puts the table into
docs/training.md.

    python benchmarks/kit.py --rounds 40 --write
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ddpkit

if TYPE_CHECKING:
    import torch

PAGE = Path(__file__).parents[1] / "docs" / "training.md"
BARE = "bare DDP loop"
SIZE, LAYERS, BATCH = 384, 12, 64
MARK, END = "<!-- kit -->", "<!-- end -->"
# By way, for each round: seconds and CPU seconds of a step.
Took = dict[str, list[tuple[float, float]]]


# In a rank.


@dataclass
class Loop:
    """The bare loop: a DDP model, its optimizer, and one batch."""

    net: Any
    optimizer: Any
    batch: torch.Tensor

    def steps(self, count: int, after: Callable[[], None] = lambda: None) -> None:
        """So many steps, `after` each of which something is called."""
        for _ in range(count):
            self.optimizer.zero_grad()
            self.net(self.batch).square().mean().backward()
            self.optimizer.step()
            after()


def loop(device: torch.device) -> Loop:
    """A new model of some MiB of gradients in three buckets."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(SIZE, SIZE), nn.ReLU())]
    net = DistributedDataParallel(nn.Sequential(*layers).to(device), bucket_cap_mb=2)
    return Loop(net, torch.optim.SGD(net.parameters(), lr=1e-3), torch.randn(BATCH, SIZE, device=device))


def bare(device: torch.device) -> Callable[[int], None]:
    return loop(device).steps


def monitored(device: torch.device) -> Callable[[int], None]:
    """Looked at after every step."""
    from ddpkit.rank import MemoryMonitor

    monitor, made = MemoryMonitor().__enter__(), loop(device)
    return lambda count: made.steps(count, monitor.step)


def profiled(device: torch.device) -> Callable[[int], None]:
    """Inside a `CommProfiler` that never ends."""
    from ddpkit.rank import CommProfiler

    made = loop(device)
    CommProfiler(made.net).__enter__()
    return made.steps


def profiled_before(device: torch.device) -> Callable[[int], None]:
    """After a `CommProfiler` has ended: the hook that it registered stays."""
    from ddpkit.rank import CommProfiler

    made = loop(device)
    with CommProfiler(made.net):
        made.steps(2)
    return made.steps


def hooked(device: torch.device) -> Callable[[int], None]:
    """With the plainest hook that torch has: what any hook costs, as DDP then no longer divides while it copies."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    made = loop(device)
    made.net.register_comm_hook(None, allreduce_hook)
    return made.steps


# What is measured: a name, and what makes, on a device, the function that takes so many steps. The bare loop comes first.
WAYS: dict[str, Callable[[torch.device], Callable[[int], None]]] = {
    BARE: bare,
    "the same once more": bare,
    "`MemoryMonitor`": monitored,
    "torch's own `allreduce_hook`": hooked,
    "`CommProfiler`": profiled,
    "`CommProfiler`, ended": profiled_before,
}


def measure(rounds: int, steps: int) -> None:
    """Report, by way and round, seconds and CPU seconds of a step."""
    from ddpkit.rank import report, setup

    with setup() as here:
        ways = {name: make(here.device) for name, make in WAYS.items()}
        report(took=in_turn(ways, rounds, steps), looks_us=looks_us(here.device))


def in_turn(ways: dict[str, Callable[[int], None]], rounds: int, steps: int) -> Took:
    """Seconds and CPU seconds of a step, by way and round; each round begins with another way."""
    import torch.distributed as dist

    took: Took = {name: [] for name in ways}
    for step in ways.values():
        step(5)
    names = list(ways)
    for number in range(rounds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            ways[name](steps)
            finish()
            took[name].append(((time.perf_counter() - began) / steps, (time.process_time() - cpu) / steps))
    return took


def finish() -> None:
    """A GPU may be at it still when the last step has come back."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def looks_us(device: torch.device) -> float:
    """What one `MemoryMonitor.step()` takes, too little to be seen in the time of a step."""
    from ddpkit.rank import MemoryMonitor

    with MemoryMonitor(device=device) as monitor:
        began = time.perf_counter()
        for _ in range(1000):
            monitor.step()
        return (time.perf_counter() - began) * 1000


# Where it is launched.


def said(values: list[float], others: list[float]) -> str:
    """`1.002 (0.998 to 1.006)`: the median of the ratios by round, and the ends of its 95 % confidence interval (by rank)."""
    ratios = sorted(mine / other for mine, other in zip(values, others, strict=True))
    n = len(ratios)
    reach = int(1.96 * n**0.5 / 2 + 1)
    low, high = ratios[max(0, n // 2 - reach)], ratios[min(n - 1, n // 2 + reach)]
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def table(took: Took, command: str, model: str) -> str:
    """The measurements as a table, with how they were made."""
    wall, cpu = ({name: [pair[i] for pair in pairs] for name, pairs in took.items()} for i in (0, 1))
    rows = [
        f"| {name} | {1000 * statistics.median(wall[name]):.2f} | "
        + ("1 | 1 |" if name == BARE else f"{said(wall[name], wall[BARE])} | {said(cpu[name], cpu[BARE])} |")
        for name in took
    ]
    how = (
        f"`{command}` on {time.strftime('%Y-%m-%d')}: 2 ranks, gloo, {os.cpu_count()} cores, torch {metadata.version('torch')}, "
        f"Python {platform.python_version()}; {model}."
    )
    head = "| a step | ms, median | time against the bare loop (95 %) | CPU time against it (95 %) |\n|:--|--:|--:|--:|"
    return "\n".join([how, "", head, *rows])


def write(found: str) -> None:
    """The table, between its marks in the page, which is made if there is none."""
    page = PAGE.read_text() if PAGE.exists() else "# Training with ddpkit\n"
    if MARK not in page:
        page += f"\n## What it costs\n\n{MARK}\n{END}\n"
    before, mark, rest = page.partition(MARK)
    _, end, after = rest.partition(END)
    PAGE.write_text(f"{before}{mark}\n{found}\n{end}{after}")


def launched(
    program: str, description: str | None, measure: Callable[[int, int], None], told: Callable[..., str]
) -> None:
    """Run `program` on 2 ranks, where it measures, and print or write what is `told` of the values that rank 0 reports."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    asked = parser.parse_args()
    if "RANK" in os.environ:
        measure(asked.rounds, asked.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DDPKIT_HOME"] = folder
        numbers = ["--rounds", str(asked.rounds), "--steps", str(asked.steps)]
        run = ddpkit.launch(program, args=numbers, nproc=2, backend="gloo", show=False).check()
        found = told(f"python benchmarks/{Path(program).name} {' '.join(numbers)} --write", **run.reported[0])
    print(found)
    if asked.write:
        write(found)


def told(command: str, took: Took, looks_us: float, **_: Any) -> str:
    """The table, and what a look at the memory takes."""
    share = looks_us / 1e6 / statistics.median(seconds for seconds, _ in took[BARE])
    looks = f"One `MemoryMonitor.step()` by itself takes {looks_us:.1f} µs, {share:.3%} of the bare step."
    return "\n\n".join([table(took, command, f"{LAYERS} layers of {SIZE} by {SIZE}, batches of {BATCH}"), looks])


if __name__ == "__main__":
    launched(__file__, __doc__, measure, told)
