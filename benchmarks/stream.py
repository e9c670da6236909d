"""From print to cell, and a flood: the live view and text, beside torchrun, torchrunx and accelerate, in one run.

    python benchmarks/stream.py [--lines 40] [--rounds 5] [--flood 20000] [--peers-python PATH] [--write]

The latency of a line is the time from just before its `print` in the rank to the arrival of the message that carries
it at the notebook's client, over real ZMQ sockets. The ways alternate, so that they share the machine's load. Peers that
are not installed are left out; `--peers-python` names the Python of an environment that has them. `--write` makes
docs/stream.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from jupyter_client import BlockingKernelClient
from kernel import kernel, messages, printed

STAMPED = """
import sys, time
for i in range({lines}):
    print(f"STAMP {{time.time_ns()}}", flush=True)
    time.sleep(0.1)
"""
FLOOD = """
import sys
for i in range({lines}):
    sys.stdout.write(f"{{i:06d}} ".ljust(79, "x") + "\\n")
"""
TORCHRUN = "{python} -m torch.distributed.run --standalone --nproc-per-node 2 {script}"
BARE, PIPED, LIVE, TEXT, RUNX, ACCELERATE = (
    "`!torchrun`",
    "`subprocess.run` of torchrun",
    "`ddpkit.launch`",
    '`ddpkit.launch(show="text")`',
    "torchrunx",
    "accelerate",
)
WAYS = {
    BARE: "!" + TORCHRUN,
    PIPED: "import subprocess; subprocess.run('" + TORCHRUN + "'.split());",
    LIVE: "import ddpkit; ddpkit.launch('{script}');",
    TEXT: "import ddpkit; ddpkit.launch('{script}', show='text');",
    RUNX: "launcher.run(job, '{script}');",
    ACCELERATE: "notebook_launcher(job, ('{script}',), num_processes=2);",
}
JOB = """def job(script):
    import runpy
    runpy.run_path(script)

"""
SETUP = "import ddpkit.display.view, ddpkit.display.terminal"
# What the kernel of a peer imports first. torchrunx shows rank 0 alone, and that at the level of warnings, unless it is told.
PEERS = {
    RUNX: JOB
    + """import logging, sys, torchrunx
launcher = torchrunx.Launcher(workers_per_host=2, backend=None, copy_env_vars=('*',))
launcher.set_logging_handlers(lambda: [logging.StreamHandler(sys.stdout)]);""",
    ACCELERATE: JOB + "import torch; from accelerate import notebook_launcher",
}
PACKAGES = {RUNX: "torchrunx", ACCELERATE: "accelerate"}
PAGE = Path(__file__).parents[1] / "docs" / "stream.md"
ABOUT = """\
Two ranks print to a real Jupyter kernel, and a client on its ZMQ sockets reads what a notebook would show. The ways took
turns. **Print to cell**: from just before a `print`, of which each rank makes ten a second, to the arrival of the message
that carries the line. **Flood**: {flood:,} lines of 80 characters from each rank; seconds from the start of the cell to the
end of its output, and the messages that it came in. In a flood `ddpkit.launch` shows the newest lines, says how many it
leaves out, and keeps all in `run.ranks[i].stdout`; the others show every line. accelerate forks its ranks from a kernel
that has imported torch. A cell has the median and, in brackets, the 95th percentile or the range."""


@dataclass
class Measured:
    """What one way took: by line, and by flood."""

    latency_ms: list[float]
    flood_s: list[float]
    messages: list[int]


def latencies_ms(client: BlockingKernelClient, code: str) -> list[float]:
    """Run the cell and return, for each stamped line, how long it took to reach this client."""
    found: dict[str, float] = {}
    for message in messages(client, code):
        arrived = time.time_ns()
        if message["msg_type"] in ("stream", "comm_msg", "display_data", "update_display_data"):
            for stamp in re.findall(r"STAMP (\d{19})", json.dumps(message["content"])):
                # The view sends what it holds once more at the end, for readers who come late: the first arrival counts.
                found.setdefault(stamp, (arrived - int(stamp)) / 1e6)
    return list(found.values())


def flooded(client: BlockingKernelClient, code: str) -> tuple[float, float]:
    """How long the cell takes, from the request to the end of its output, and in how many messages that comes."""
    before = time.monotonic()
    count = sum(1 for _ in messages(client, code))
    return time.monotonic() - before, count


def p95(values: list[float]) -> float:
    """The value that 95 of 100 do not exceed."""
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def versions(python: str) -> dict[str, str]:
    """Those of the peers that are installed in the environment of `python`, by way."""
    found = {}
    for way, package in PACKAGES.items():
        ask = f"from importlib.metadata import version; print(version('{package}'))"
        answer = subprocess.run([python, "-c", ask], capture_output=True, text=True)
        if answer.returncode == 0:
            found[way] = f"{package} {answer.stdout.strip()}"
    return found


def measured(home: Path, rounds: int, peers: dict[str, str], python: str) -> dict[str, Measured]:
    """Every way once a round, each in a fresh kernel."""
    found = {way: Measured([], [], []) for way in WAYS if way not in PEERS or way in peers}
    for _ in range(rounds):
        for way, taken in found.items():
            with kernel(home, python if way in PEERS else sys.executable) as client:
                printed(client, PEERS.get(way, SETUP))
                code = WAYS[way]
                taken.latency_ms += latencies_ms(client, code.format(python=sys.executable, script="stamped.py"))
                took_s, count = flooded(client, code.format(python=sys.executable, script="flood.py"))
                taken.flood_s.append(took_s)
                taken.messages.append(count)
    return found


def told(found: dict[str, Measured], asked: argparse.Namespace, peers: dict[str, str]) -> str:
    """The page: how it was measured, the table, and the two ratios that count."""
    command = f"python benchmarks/stream.py --lines {asked.lines} --rounds {asked.rounds} --flood {asked.flood}"
    where = f"{platform.machine()}, {os.cpu_count()} cores, torch {metadata.version('torch')}, Python {platform.python_version()}"
    also = ", ".join(peers.values()) or "no peer is installed"
    how = f"Measured by `{command}` on {time.strftime('%Y-%m-%d')}: {where}, {also}; load before it {asked.load:.1f}."
    rows = [
        f"| {way} | {statistics.median(one.latency_ms):.1f} ms ({p95(one.latency_ms):.1f}) | "
        f"{statistics.median(one.flood_s):.2f} s ({min(one.flood_s):.2f} to {max(one.flood_s):.2f}) | "
        f"{statistics.median(one.messages):,.0f} |"
        for way, one in found.items()
    ]
    head = "| | print to cell, median (p95) | flood, median (range) | messages |\n|:--|--:|--:|--:|"
    beside = [mine / other for mine, other in zip(found[TEXT].flood_s, found[LIVE].flood_s, strict=True)]
    ratio = f"A flood as text takes {statistics.median(beside):.2f} times the live view's time (median of the rounds)."
    return "\n\n".join(["# From print to cell", how, ABOUT.format(flood=asked.flood), "\n".join([head, *rows]), ratio])


def main() -> None:
    """Measure, alternating the ways, and print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--lines", type=int, default=40)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--flood", type=int, default=20_000, help="lines of each rank")
    options.add_argument("--peers-python", default=sys.executable, metavar="PATH")
    options.add_argument("--write", action="store_true", help=f"make the page {PAGE.name}")
    asked = options.parse_args(namespace=argparse.Namespace(load=os.getloadavg()[0]))
    peers = versions(asked.peers_python)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "stamped.py").write_text(STAMPED.format(lines=asked.lines))
        (home / "flood.py").write_text(FLOOD.format(lines=asked.flood))
        page = told(measured(home, asked.rounds, peers, asked.peers_python), asked, peers)
    print(page)
    if asked.write:
        PAGE.write_text(page + "\n")


if __name__ == "__main__":
    main()
