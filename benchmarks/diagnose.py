"""What it costs to diagnose a long log: seconds and memory of `ddpkit diagnose` over 200 MB of five kinds of lines.

Each log is made anew and ends in the same failure, an exception on rank 3, which must be found. Seconds are those of the
whole command, with Python's start; memory is the command's largest resident set. The median of `--rounds`, the smallest and
the largest. `--write` puts the table into docs/diagnose.md.

    python benchmarks/diagnose.py --rounds 5 --write
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "diagnose.md"
FAILURE = """[rank3]: Traceback (most recent call last):
[rank3]:   File "/home/you/train.py", line 41, in <module>
[rank3]:     loss = net(batch).mean()
[rank3]: RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.
"""


def training(i: int, dice: random.Random) -> str:
    return (
        f"[default{i % 8}]:2026-03-01 12:{i // 60 % 60:02d}:{i % 60:02d} | INFO | train | epoch {i // 9000} step {i} "
        f"loss {dice.random():.4f} grad_norm {dice.random():.3f} lr 3.0e-4 throughput {dice.randrange(9999)} tok/s\n"
    )


def bars(i: int, dice: random.Random) -> str:
    done = i % 5000
    speed = f"{dice.random():.2f}it/s, loss=0.{i % 977}"
    return f"\rEpoch {i // 5000}: {done // 50:3d}%|{'█' * (done // 500)}| {done}/5000 [12:0{i % 10}<34:56, {speed}]"


def nccl(i: int, dice: random.Random) -> str:
    who = f"node{i % 16}:{4000 + i % 8}:{5000 + i % 8} [{i % 8}]"
    return (
        f"{who} NCCL INFO AllReduce: opCount {i:x} sendbuff 0x{dice.getrandbits(48):x} count {dice.randrange(10**7)}\n"
    )


def warnings(i: int, dice: random.Random) -> str:
    where = f"/opt/env/lib/python3.11/site-packages/lib/mod{i % 97}.py:{dice.randrange(999)}"
    return f"{i % 8}: {where}: FutureWarning: this will raise an error in a future version\n"


def errors(i: int, dice: random.Random) -> str:
    return (
        f"[rank{i % 8}]: ERROR: worker {i} could not read sample {dice.getrandbits(32):08x}: timed out, trying again\n"
    )


KINDS: dict[str, tuple[str, Callable[[int, random.Random], str]]] = {
    "training": ("a training log, one line per step and rank", training),
    "bars": ("progress bars, one line of carriage returns", bars),
    "nccl": ("`NCCL_DEBUG=INFO`", nccl),
    "warnings": ("warnings that name errors", warnings),
    "errors": ("handled errors, no two alike", errors),
}


def write_log(path: Path, megabytes: int, line: Callable[[int, random.Random], str]) -> None:
    """A log of that size with the failure at its end."""
    dice = random.Random(0)
    block, size, i = [], 0, 0
    with path.open("w") as log:
        while size < megabytes * 10**6:
            block = [line(i + j, dice) for j in range(2000)]
            i += 2000
            size += log.write("".join(block))
        log.write("\n" + FAILURE)


def measure(log: Path) -> tuple[float, float, str]:
    """Seconds, MiB, and what the command said."""
    command = [str(Path(sys.executable).with_name("ddpkit")), "diagnose", "--json", str(log)]
    said = log.with_suffix(".json")
    began = time.perf_counter()
    child = os.posix_spawn(
        command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, str(said), 577, 0o600)]
    )
    _, _, usage = os.wait4(child, 0)
    seconds = time.perf_counter() - began
    found = json.loads(said.read_text())
    return seconds, usage.ru_maxrss / 1024, f"{found['name']}, rank {found['rank']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    options = parser.parse_args()
    rows = []
    for what, line in KINDS.values():
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "train.log"
            write_log(log, options.megabytes, line)
            runs = [measure(log) for _ in range(options.rounds)]
        seconds, mebibytes = [r[0] for r in runs], max(r[1] for r in runs)
        (said,) = {r[2] for r in runs}
        spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
        rows.append(f"| {what} | {statistics.median(seconds):.1f} | {spread} | {mebibytes:.0f} | {said} |")
        print(rows[-1], flush=True)
    if options.write:
        write(rows, options)


def write(rows: list[str], options: argparse.Namespace) -> None:
    """The table, between its marks in the page."""
    table = "\n".join(["| lines | s, median | range | MiB | found |", "|:--|--:|--:|--:|:--|", *rows])
    command = f"`python benchmarks/diagnose.py --rounds {options.rounds} --write`"
    how = f"{command}, {options.megabytes} MB each, {os.cpu_count()} cores, Python {platform.python_version()}."
    before, mark, rest = PAGE.read_text().partition("<!-- speed -->")
    _, end, after = rest.partition("<!-- end -->")
    PAGE.write_text(f"{before}{mark}\n{how}\n\n{table}\n{end}{after}")


if __name__ == "__main__":
    main()
