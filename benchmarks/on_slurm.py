"""What `launch(slurm=)` adds to a job: the same job by ddpkit and by a plain sbatch, in turn, on a Slurm of two hosts.

    python benchmarks/on_slurm.py [--rounds 7] [--write]

The hosts are those of tests/slurm_cluster.py, both on this machine, and the queue is empty. The plain file is the one that
ddpkit writes beside its own, `plain.sbatch`: the same torchrun on each host, without ddpkit. `--write` puts the table into
docs/slurm.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import ddpkit
from ddpkit.launcher.slurm_queue import state_of, submit
from ddpkit.runfolder import wire

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from slurm_cluster import cluster, why_not  # noqa: E402

PAGE = ROOT / "docs" / "slurm.md"
MARK, END = "<!-- overhead -->", "<!-- end -->"
JOB = """
import time
print("FIRST", time.time_ns(), flush=True)
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(5):
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""
PLAIN, OURS = "`sbatch plain.sbatch`", "`launch(slurm=...)`"
HEADS = ("first line of a rank, s", "job ended in Slurm, s", "control back, s")
POLL_S = 0.02
# One way's seconds by round, in the order of the heads.
Took = list[tuple[float, ...]]


def first_line_s(texts: list[str], began_ns: int) -> float:
    """Seconds from the submission to the earliest line of any rank."""
    stamps = [int(stamp) for text in texts for stamp in re.findall(r"FIRST (\d{19})", text)]
    if len(stamps) != 2:
        raise SystemExit(f"a job of 2 ranks printed {len(stamps)} first lines: {texts}")
    return (min(stamps) - began_ns) / 1e9


def until_ended(number: str) -> None:
    """Return when Slurm has ended the job; another end than a good one ends the benchmark."""
    while not (state := state_of(number)).ended or state.state == "COMPLETING":
        time.sleep(POLL_S)
    if state.state != "COMPLETED":
        raise SystemExit(f"job {number} {state.words}")


def plain(file: Path) -> tuple[float, ...]:
    """The job by sbatch alone."""
    began_ns, began = time.time_ns(), time.monotonic()
    number = submit(file)
    until_ended(number)
    took_s = time.monotonic() - began
    return first_line_s([out.read_text() for out in Path().glob(f"*-{number}.out")], began_ns), took_s, took_s


def ours() -> tuple[tuple[float, ...], Path]:
    """The job by ddpkit, and its run folder."""
    began_ns, began = time.time_ns(), time.monotonic()
    run = ddpkit.launch("job.py", slurm=ddpkit.SlurmOptions(nodes=2), nproc=1, show=False, wait=False)
    until_ended((wire.read_record(run.folder / wire.JOB) or {})["slurm"])
    ended_s = time.monotonic() - began
    run.wait().check()
    back_s = time.monotonic() - began
    return (first_line_s([rank.stdout for rank in run.ranks], began_ns), ended_s, back_s), run.folder


def said(values: list[float]) -> str:
    """The median, and the least and the most."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def told(found: dict[str, Took], asked: argparse.Namespace) -> str:
    """How it was measured, and the table."""
    where = f"{os.cpu_count()} cores, torch {metadata.version('torch')}, Python {platform.python_version()}"
    how = (
        f"`python benchmarks/on_slurm.py --rounds {asked.rounds}` on {time.strftime('%Y-%m-%d')}: 2 hosts, 1 rank each, "
        f"gloo, 5 steps; {where}; load before it {asked.load:.1f}. Seconds from the submission: median, least and most."
    )
    rows = {way: [list(column) for column in zip(*took, strict=True)] for way, took in found.items()}
    more = [[o - p for o, p in zip(*both, strict=True)] for both in zip(rows[OURS], rows[PLAIN], strict=True)]
    lines = [
        f"| {way} | {' | '.join(map(said, columns))} |" for way, columns in {**rows, "more, by round": more}.items()
    ]
    return "\n".join([how, "", f"| | {' | '.join(HEADS)} |", "|:--|--:|--:|--:|", *lines])


def main() -> None:
    """Measure, in turn, and print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    asked = options.parse_args(namespace=argparse.Namespace(load=os.getloadavg()[0]))
    if reason := why_not():
        raise SystemExit(reason)
    found: dict[str, Took] = {PLAIN: [], OURS: []}
    with tempfile.TemporaryDirectory() as folder, cluster():
        os.chdir(folder)
        Path("job.py").write_text(JOB)
        # Once to warm the disk's cache, and for the plain file.
        _, made = ours()
        file = made / "plain.sbatch"
        for number in range(asked.rounds):
            for way in (PLAIN, OURS) if number % 2 else (OURS, PLAIN):
                found[way].append(plain(file) if way == PLAIN else ours()[0])
                print(way, found[way][-1], file=sys.stderr, flush=True)
        os.chdir(ROOT)
    table = told(found, asked)
    print(table)
    if asked.write:
        before, mark, rest = PAGE.read_text().partition(MARK)
        _, end, after = rest.partition(END)
        PAGE.write_text(f"{before}{mark}\n{table}\n{end}{after}")


if __name__ == "__main__":
    main()
