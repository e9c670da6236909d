"""Streaming from a real kernel: print-to-notebook latency and a flood, beside `!torchrun` and `subprocess.run`, in one run.

    python benchmarks/stream.py [--lines 40] [--rounds 3]

The latency of a line is the time from just before its `print` in the rank to the arrival of the message that carries
it at the notebook's client, over real ZMQ sockets. Rounds of the three ways alternate, so that they share the machine's
load; figures are medians with their spread, and the ratios are what to quote.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

from jupyter_client import BlockingKernelClient
from kernel import kernel, messages

STAMPED = """
import sys, time
for i in range({lines}):
    print("STAMP", time.time_ns(), flush=True)
    time.sleep(0.1)
"""
FLOOD = """
import sys
for i in range(100_000):
    sys.stdout.write(f"{i:06d} ".ljust(79, "x") + "\\n")
"""
TORCHRUN = "{python} -m torch.distributed.run --standalone --nproc-per-node 2 {script}"
WAYS = {
    "!torchrun": "!" + TORCHRUN,
    "subprocess.run": "import subprocess; subprocess.run('" + TORCHRUN + "'.split());",
    "ddpkit.launch": "import ddpkit; ddpkit.launch('{script}');",
}


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


def seconds(client: BlockingKernelClient, code: str) -> float:
    """How long the cell takes, from the request to the end of its output."""
    before = time.monotonic()
    for _ in messages(client, code):
        pass
    return time.monotonic() - before


def spread(values: list[float], unit: str) -> str:
    """`12.3 ms (p95 20.1, 8.0 to 31.2, n=80)`."""
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return f"{statistics.median(ordered):8.1f} {unit} (p95 {p95:.1f}, {ordered[0]:.1f} to {ordered[-1]:.1f}, n={len(ordered)})"


def main() -> None:
    """Measure, alternating the ways, and print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--lines", type=int, default=40)
    options.add_argument("--rounds", type=int, default=3)
    asked = options.parse_args()
    latency: dict[str, list[float]] = {way: [] for way in WAYS}
    flood: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "stamped.py").write_text(STAMPED.format(lines=asked.lines))
        (home / "flood.py").write_text(FLOOD)
        for _ in range(asked.rounds):
            for way, code in WAYS.items():
                with kernel(home) as client:
                    seconds(client, "import subprocess, ddpkit, ddpkit.display.view")
                    latency[way] += latencies_ms(client, code.format(python=sys.executable, script="stamped.py"))
                    flood[way].append(seconds(client, code.format(python=sys.executable, script="flood.py")))
    report(latency, flood)


def report(latency: dict[str, list[float]], flood: dict[str, list[float]]) -> None:
    """The two tables, and the ratios that the README quotes."""
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    )
    print("\nprint to notebook, 2 ranks")
    for way, values in latency.items():
        print(f"  {way:<15}{spread(values, 'ms')}")
    print("\n2 x 100,000 lines of 80 characters, cell start to end")
    for way, values in flood.items():
        print(f"  {way:<15}{spread(values, 's')}")
    ours, theirs = statistics.median(latency["ddpkit.launch"]), statistics.median(latency["!torchrun"])
    beside = [a / b for a, b in zip(flood["ddpkit.launch"], flood["subprocess.run"], strict=True)]
    print(
        f"\nlatency beside !torchrun: {ours / theirs:.2f}; flood beside subprocess.run: {statistics.median(beside):.2f}"
    )


if __name__ == "__main__":
    main()
