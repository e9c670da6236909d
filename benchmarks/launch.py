"""From pressing Run to a process group: `ddpkit.launch` warm and cold, beside `!torchrun` and accelerate, in one run.

    python benchmarks/launch.py [--rounds 7] [--accelerate-python PATH] [--first] [--memory] [--preload] [--write]

Every launch is a cell of a real Jupyter kernel that stays for the whole run, as a learner's does. The clock starts in
the kernel just before the launching call. Each rank prints the time as its script's first line, before torch is
imported, and again after `init_process_group("gloo")` and a first all_reduce; the earliest rank's first line and the
latest rank's second one count. Each round runs every way once, in rotated order, so that the ways share the machine's
load; figures are medians with their spread, and the ratios are what to quote.

accelerate forks its ranks from the kernel, so it has a kernel of its own, with torch and accelerate imported and the
script as a function. Where accelerate is not installed it is left out; `--accelerate-python` names the Python of
another environment that has it. Both kernels have launched once before the first round.

CPU is what the whole machine was busy, by /proc/stat, while the cell ran: it counts every process of a job, and whatever
else ran meanwhile. So measure on a machine that is otherwise quiet; how busy it was just before the run is told as well.

`--first` measures the first launch of a fresh kernel as well, which has to wait for the warm process to import torch;
`--memory` what the warm process and a rank keep for themselves, `--preload` what each module that the warm process
imports costs, beside some that it leaves to the scripts that want them; `--write` makes docs/launch.md and docs/launch.png.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

from jupyter_client import BlockingKernelClient
from kernel import ROOT, kernel, printed

from ddpkit.recorder.zygote import NEEDED_BY_ALL, NEEDED_BY_MANY

PAGE = ROOT / "docs" / "launch.md"
CHART = ROOT / "docs" / "launch.png"
# Long enough for the warm process to import what it leaves for when nobody asks for anything.
WARMING_S = 6.0
SETTLING_S = 1.0
IDLE_S = 5.0

# torchrun runs Python with -u, and a line of several writes would mix with those of other ranks.
PLAIN = r"""
import time
print(f"FIRST {time.time_ns()}\n", end="", flush=True)
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print(f"UP {time.time_ns()}\n", end="", flush=True)
"""
STEP = r"""
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 8)).sum().backward()
optimizer.step()
print(f"STEP {time.time_ns()}\n", end="", flush=True)
"""
END = "dist.destroy_process_group()\n"
SCRIPTS = {
    "job_plain.py": PLAIN + END,
    "job_step.py": PLAIN + STEP + END,
    "job_sitting.py": PLAIN + STEP + "time.sleep(600)\n",
}

BARE, COLD, WARM, ACCELERATE = "!torchrun", "ddpkit, cold", "ddpkit, warm", "accelerate"
# The call that is timed, and the lines after it that hand on what the ranks printed and refuse a job that went wrong.
LAUNCH = {
    BARE: "!{python} -m torch.distributed.run --standalone --nproc-per-node {ranks} {script}",
    COLD: "run = ddpkit.launch('{script}', nproc={ranks}, warm=False, show=False)",
    WARM: "run = ddpkit.launch('{script}', nproc={ranks}, show=False)",
    ACCELERATE: "notebook_launcher(job, num_processes={ranks})",
}
PRINTED = "print(*(rank.stdout for rank in run.ranks))\n"
# The warm process is started anew when packages are installed or removed meanwhile, and the launch that finds out waits for it.
SAME_PROCESS = """\
from ddpkit.processes import zygote
warm_processes.add(zygote._current.pid)
assert len(warm_processes) == 1, "the warm process was started anew: were packages installed?"
"""
SETUP = "import ddpkit; warm_processes = set()"
AFTERWARDS = {
    BARE: "assert _exit_code == 0, f'torchrun ended with exit code {_exit_code}'",
    COLD: PRINTED + "assert run.ok and not run.warm, f'{run}, {run.started}'",
    WARM: PRINTED + "assert run.ok and run.warm, f'{run}, {run.started}'\n" + SAME_PROCESS,
    ACCELERATE: "",
}
TIMED = "import time; began = time.time_ns()\n{launch}\nback = time.time_ns()\n{afterwards}\nprint('BEGAN', began, 'BACK', back)"
ACCELERATE_SETUP = "from accelerate import notebook_launcher\ndef job():\n" + textwrap.indent(PLAIN + END, "    ")
SITTING = """
import time
run = ddpkit.launch("job_sitting.py", nproc=2, warm={warm}, wait=False, show=False, stall=None)
while run.state == "running" and sum("STEP" in rank.stdout for rank in run.ranks) < 2:
    time.sleep(0.1)
assert run.state == "running" and run.warm is {warm}, f"{{run}}, {{run.started}}"
print("PIDS", *(rank.pid for rank in run.ranks))
"""

RANKS = {BARE: (2, 4), COLD: (2, 4, 8), WARM: (2, 4, 8), ACCELERATE: (2, 4)}
FIRST, UP, BACK, CPU = "first printed line", "process group up", "control back", "CPU"
FIRST_LAUNCH = {WARM: {"DDPKIT_WARM": "1"}, COLD: {"DDPKIT_WARM": "0"}}

ABOUT_WAYS = """\
Seconds from the launching call in a cell of a Jupyter kernel to the earliest rank's first printed line (before its
`import torch`), until every rank's process group is up (gloo, after a first all_reduce), and until the call returns; and
the CPU seconds of the whole machine. Each cell has the median and, in brackets, the minimum and the maximum. The methods
took turns, and each kernel had launched once before. accelerate's `notebook_launcher`, if it was measured, forks its ranks
from a kernel that has imported torch."""
ABOUT_GROWTH = """\
## More ranks

The same launches, cold (`warm=False`) and warm, also with more ranks than the machine has cores."""
ABOUT_FIRST = """\
## The first launch of a kernel

Seconds from the call, in a fresh kernel each time. The call is made as soon as the kernel is ready, without
`%load_ext ddpkit`, so it starts the warm process itself, and that process must import torch first."""
ABOUT_MEMORY = """\
## Memory

A process's private memory, from /proc: its private dirty pages, its private clean pages (of files that no other process
has mapped), and their sum, which would be freed if only this process ended. The warm process has no job; the ranks belong
to a job of 2 that has done one small DDP step."""

ABOUT_PRELOAD = """\
## What is preloaded

Seconds and private dirty MiB that each import adds, in this order, in a fresh process. "At once": torchrun and every rank
need it. "Later": an ordinary DDP script imports it while it runs (DDP's constructor imports `torch._dynamo`); the warm
process imports it when it is idle. "Not": scripts that need it import it themselves."""
LEFT_OUT = ("torch.distributed.optim", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._inductor")
IMPORTING = """
import importlib, re, sys, time
def private_mib():
    with open("/proc/self/smaps_rollup") as file:
        return int(re.search(r"Private_Dirty: +([0-9]+)", file.read())[1]) / 1024
for name in sys.argv[1:]:
    began, before = time.monotonic(), private_mib()
    importlib.import_module(name)
    print(name, time.monotonic() - began, private_mib() - before)
"""

# Values in seconds: by way and number of ranks, then by figure.
Launches = dict[tuple[str, int], dict[str, list[float]]]


def stamps(text: str, mark: str, expected: int) -> list[float]:
    """The times in seconds that were printed after `mark`."""
    found = [int(ns) / 1e9 for ns in re.findall(rf"{mark} (\d{{19}})", text)]
    if len(found) != expected:
        raise SystemExit(f"{len(found)} lines with {mark} instead of {expected} in:\n{text}")
    return found


def busy_s() -> float:
    """CPU seconds that all cores have worked since the machine started, for anybody."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def busy_while_idle() -> float:
    """The share of the machine's cores that is busy with something else."""
    before = busy_s()
    time.sleep(IDLE_S)
    return (busy_s() - before) / IDLE_S / (os.cpu_count() or 1)


# Each launch, and what it took.


def timed_cell(way: str, ranks: int) -> str:
    """The cell that launches the plain script and prints when it began and when control was back."""
    launch = LAUNCH[way].format(python=sys.executable, ranks=ranks, script="job_plain.py")
    return TIMED.format(launch=launch, afterwards=AFTERWARDS[way])


def one_launch(client: BlockingKernelClient, way: str, ranks: int) -> dict[str, float]:
    """Launch once; the seconds from the call to each event, and the CPU seconds of the machine."""
    busy_before_s = busy_s()
    text = printed(client, timed_cell(way, ranks))
    cpu_s = busy_s() - busy_before_s
    time.sleep(SETTLING_S)
    began = stamps(text, "BEGAN", 1)[0]
    return {
        FIRST: min(stamps(text, "FIRST", ranks)) - began,
        UP: max(stamps(text, "UP", ranks)) - began,
        BACK: stamps(text, "BACK", 1)[0] - began,
        CPU: cpu_s,
    }


def launches(home: Path, rounds: int, accelerate_python: str | None) -> Launches:
    """Every way and number of ranks, once a round."""
    with ExitStack() as kernels:
        main = kernels.enter_context(kernel(home))
        clients = dict.fromkeys((BARE, COLD, WARM), main)
        printed(main, "%load_ext ddpkit\n" + SETUP)
        printed(main, timed_cell(WARM, 2))
        if accelerate_python:
            clients[ACCELERATE] = kernels.enter_context(kernel(home, accelerate_python))
            printed(clients[ACCELERATE], ACCELERATE_SETUP)
            printed(clients[ACCELERATE], timed_cell(ACCELERATE, 2))
        time.sleep(WARMING_S)
        cases = [(way, ranks) for way in clients for ranks in RANKS[way]]
        found: Launches = {case: {figure: [] for figure in (FIRST, UP, BACK, CPU)} for case in cases}
        for n in range(rounds):
            turn = n % len(cases)
            for way, ranks in cases[turn:] + cases[:turn]:
                for figure, value in one_launch(clients[way], way, ranks).items():
                    found[way, ranks][figure].append(value)
    return found


def first_launches(home: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """The first launch of a fresh kernel in seconds, by event and then by whether a warm start was allowed."""
    events = {UP: ("job_plain.py", "UP"), "first DDP step done": ("job_step.py", "STEP")}
    found: dict[str, dict[str, list[float]]] = {event: {way: [] for way in FIRST_LAUNCH} for event in events}
    for n in range(rounds):
        for event, (script, mark) in events.items():
            for way in sorted(FIRST_LAUNCH, reverse=bool(n % 2)):
                launch = LAUNCH[WARM].format(ranks=2, script=script)
                with kernel(home, env=FIRST_LAUNCH[way]) as client:
                    printed(client, SETUP)
                    text = printed(client, TIMED.format(launch=launch, afterwards=AFTERWARDS[way]))
                found[event][way].append(max(stamps(text, mark, 2)) - stamps(text, "BEGAN", 1)[0])
    return found


def private_mib(pid: int) -> dict[str, float]:
    """What memory would be free again if the process ended alone; clean pages are those of files."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kib = {name: int(value) for name, value in re.findall(r"^Private_(\w+): +(\d+) kB$", text, re.MULTILINE)}
    return {"dirty": kib["Dirty"] / 1024, "clean": kib["Clean"] / 1024, "USS": (kib["Dirty"] + kib["Clean"]) / 1024}


def memory(home: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Private memory of the idle warm process, and of each rank of a job of 2 that sits after a DDP step."""
    found: dict[str, list[dict[str, float]]] = {"warm process, idle": [], "rank, warm": [], "rank, cold": []}
    with kernel(home) as client:
        printed(client, "%load_ext ddpkit\n" + SETUP)
        printed(client, timed_cell(WARM, 2))
        time.sleep(WARMING_S)
        for _ in range(rounds):
            pid = int(printed(client, "print(zygote._current.pid)"))
            found["warm process, idle"].append(private_mib(pid))
            for way, warm in (("rank, warm", True), ("rank, cold", False)):
                pids = printed(client, SITTING.format(warm=warm)).partition("PIDS ")[2].split()
                found[way] += [private_mib(int(pid)) for pid in pids]
                printed(client, "_ = run.stop()")
                time.sleep(SETTLING_S)
    return found


def imports(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds and MiB that each module adds, by round."""
    names = (*NEEDED_BY_ALL, *NEEDED_BY_MANY, *LEFT_OUT)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        command = [sys.executable, "-c", IMPORTING, *names]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            name, took_s, mib = line.split()
            found[name].append((float(took_s), float(mib)))
    return found


# What is told of it.


def spread(values: list[float], digits: int = 2) -> str:
    """`0.52 (0.49 to 0.61)`: median, least and most."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def machine(rounds: int, accelerate: str | None) -> str:
    """The line that says what was measured when, and on what; taken before the first launch."""
    versions = f"torch {metadata.version('torch')}, Python {platform.python_version()}"
    other = f"accelerate {accelerate}" if accelerate else "accelerate is not installed and was left out"
    return (
        f"Measured by `benchmarks/launch.py` on {time.strftime('%Y-%m-%d')}: {rounds} rounds, {platform.machine()}, "
        f"{os.cpu_count()} cores, {versions}, {other}. Before the run the load was {os.getloadavg()[0]:.2f}, and "
        f"{busy_while_idle():.1%} of the cores were busy."
    )


def told_ways(found: Launches) -> str:
    """Each way with 2 and 4 ranks."""
    figures = (FIRST, UP, BACK, CPU)
    both = [(way, ranks) for ranks in (2, 4) for way in RANKS if (way, ranks) in found]
    rows = [[way, str(ranks), *(spread(found[way, ranks][figure]) for figure in figures)] for way, ranks in both]
    return table(["way", "ranks", *(f"{figure}, s" for figure in figures)], rows)


def told_ratios(found: Launches) -> str:
    """How many times longer bare torchrun takes than a warm start, and a warm start than accelerate."""

    def ratio(above: str, below: str, ranks: int, figure: str) -> str:
        return f"{statistics.median(found[above, ranks][figure]) / statistics.median(found[below, ranks][figure]):.2f}"

    pairs = [(BARE, WARM), *([(WARM, ACCELERATE)] if (ACCELERATE, 2) in found else [])]
    rows = [
        [f"{above} / {below}", str(ranks), ratio(above, below, ranks, UP), ratio(above, below, ranks, BACK)]
        for above, below in pairs
        for ranks in (2, 4)
    ]
    return table(["ratio of medians", "ranks", UP, BACK], rows)


def told_growth(found: Launches) -> str:
    """Cold against warm as the ranks become more."""
    figures = (UP, BACK, CPU)
    head = ["ranks", *(f"{figure}, s: {way.split()[-1]}" for figure in figures for way in (COLD, WARM))]
    rows = [
        [str(ranks), *(spread(found[way, ranks][figure]) for figure in figures for way in (COLD, WARM))]
        for ranks in RANKS[WARM]
    ]
    return table(head, rows)


def told_first(found: Mapping[str, Mapping[str, list[float]]]) -> str:
    """The first launch of a fresh kernel."""
    head = ["2 ranks, first launch", "warm start, s", "`DDPKIT_WARM=0`, s"]
    return table(head, [[event, spread(ways[WARM]), spread(ways[COLD])] for event, ways in found.items()])


def told_memory(found: Mapping[str, list[dict[str, float]]]) -> str:
    """Private memory of each kind of process."""
    kinds = ("dirty", "clean", "USS")
    head = ["private memory, MiB", *kinds, "n"]
    rows = [
        [what, *(spread([each[kind] for each in values], 0) for kind in kinds), str(len(values))]
        for what, values in found.items()
    ]
    return table(head, rows)


def told_preload(found: Mapping[str, list[tuple[float, float]]]) -> str:
    """The table of imports."""
    when = {**dict.fromkeys(NEEDED_BY_ALL, "at once"), **dict.fromkeys(NEEDED_BY_MANY, "later")}
    rows = [
        [f"`{name}`", spread([s for s, _ in each]), spread([mib for _, mib in each], 0), when.get(name, "not")]
        for name, each in found.items()
    ]
    return table(["module", "seconds", "MiB", "preloaded"], rows)


def draw(found: Launches) -> None:
    """The chart: each way with 2 and with 4 ranks, and below how cold and warm starts grow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = pyplot.subplot_mosaic([[2, 4], ["growth", "growth"]], figsize=(9, 8), height_ratios=(3, 2))
    for ranks in (2, 4):
        draw_ways(axes[ranks], found, ranks)
    axes[4].sharex(axes[2])
    axes[4].tick_params(labelleft=False)
    handles, labels = axes[2].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=3, frameon=False)
    draw_growth(axes["growth"], found)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    figure.savefig(CHART, dpi=200)


def reach(each: list[list[float]]) -> list[list[float]]:
    """How far whiskers go below and above each median, to the least and the most."""
    medians = [statistics.median(values) for values in each]
    return [
        [median - min(values) for median, values in zip(medians, each, strict=True)],
        [max(values) - median for median, values in zip(medians, each, strict=True)],
    ]


def draw_ways(axes: Any, found: Launches, ranks: int) -> None:
    """Grouped bars of one number of ranks, medians written beside whiskers from least to most."""
    ways = [way for way in RANKS if (way, ranks) in found]
    for n, (figure, colour) in enumerate(((FIRST, "#56B4E9"), (UP, "#0072B2"), (BACK, "#E69F00"))):
        each = [found[way, ranks][figure] for way in ways]
        places = [row + 0.27 * (n - 1) for row in range(len(ways))]
        medians = [statistics.median(values) for values in each]
        whiskers = {"xerr": reach(each), "error_kw": {"lw": 1, "capsize": 2}}
        axes.barh(places, medians, 0.25, color=colour, label=figure, **whiskers)
        for values, median, place in zip(each, medians, places, strict=True):
            axes.text(max(values), place, f"  {median:.2f}", va="center", fontsize=9)
    axes.set_yticks(range(len(ways)), ways)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(title=f"{ranks} ranks", xlabel="seconds after the launching call")


def draw_growth(axes: Any, found: Launches) -> None:
    """Seconds to the process group by number of ranks, for cold and warm starts."""
    counts = RANKS[WARM]
    for way, colour, marker in ((COLD, "#D55E00", "s"), (WARM, "#009E73", "o")):
        each = [found[way, ranks][UP] for ranks in counts]
        medians = [statistics.median(values) for values in each]
        axes.errorbar(counts, medians, yerr=reach(each), color=colour, marker=marker, capsize=3)
        for ranks, median in zip(counts, medians, strict=True):
            axes.annotate(f"{median:.2f}", (ranks, median), (-6, 6), textcoords="offset points", ha="right", fontsize=9)
        axes.annotate(way, (counts[-1], medians[-1]), (8, 0), textcoords="offset points", va="center", color=colour)
    axes.set(xlabel="ranks", ylabel="seconds until the\nprocess group is up", xticks=counts)
    axes.set_ylim(bottom=0)
    axes.set_xlim(counts[0] - 0.5, counts[-1] + 1.2)


def accelerate_version(python: str) -> str | None:
    """The version of accelerate in the environment of `python`; None where it has none."""
    ask = "from importlib.metadata import version; print(version('accelerate'))"
    answer = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    return answer.stdout.strip() or None


def main() -> None:
    """Measure what was asked for, print the page, and write it if asked to."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--accelerate-python", default=sys.executable, metavar="PATH")
    options.add_argument("--first", action="store_true")
    options.add_argument("--memory", action="store_true")
    options.add_argument("--preload", action="store_true")
    options.add_argument("--write", action="store_true")
    asked = options.parse_args()
    accelerate = accelerate_version(asked.accelerate_python)
    parts = ["# How long a launch takes", machine(asked.rounds, accelerate)]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for name, text in SCRIPTS.items():
            (home / name).write_text(text)
        found = launches(home, asked.rounds, asked.accelerate_python if accelerate else None)
        parts += [ABOUT_WAYS, told_ways(found), told_ratios(found), f"![The same as bars and lines]({CHART.name})"]
        parts += [ABOUT_GROWTH, told_growth(found)]
        if asked.first:
            parts += [ABOUT_FIRST, told_first(first_launches(home, asked.rounds))]
        if asked.memory:
            parts += [ABOUT_MEMORY, told_memory(memory(home, asked.rounds))]
        if asked.preload:
            parts += [ABOUT_PRELOAD, told_preload(imports(asked.rounds))]
    print("\n\n".join(parts))
    if asked.write:
        PAGE.write_text("\n\n".join(parts) + "\n")
        draw(found)


if __name__ == "__main__":
    main()
