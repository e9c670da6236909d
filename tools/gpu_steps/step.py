"""What the steps of the day share: where one writes, how it says what it has seen, and how it starts jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ddpkit

PROGRAMS = Path(__file__).with_name("programs")
# A collective may take so long, and a hang is looked at so soon. The dry run, where nothing is learned, is quicker.
TIMEOUT_S, STALL_S = 10, 4
DRY_TIMEOUT_S, DRY_STALL_S = 3, 1.5
# How torch's watchdog is set: it writes the flight recorder's dump, and goes on four times this long before it aborts.
WATCHDOG = {
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1500",
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
    "NCCL_DEBUG": "WARN",
}
NEEDS_GPU = "needs a GPU"


class Step:
    """One step in its own folder. Whatever it says is on the disk at once: the step may be ended at any moment."""

    def __init__(self, name: str, folder: Path, dry: bool) -> None:
        self.name, self.folder, self.dry = name, folder, dry
        self._result: dict[str, Any] = {"seen": "", "figures": {}, "bundles": {}, "logs": {}}

    @property
    def timeout_s(self) -> float:
        """After which a collective fails."""
        return DRY_TIMEOUT_S if self.dry else TIMEOUT_S

    @property
    def stall_s(self) -> float:
        return DRY_STALL_S if self.dry else STALL_S

    def see(self, seen: str, **figures: Any) -> None:
        """What was seen, in one line for the table, and the figures beside it."""
        self._result["seen"] = seen
        self._result["figures"] |= figures
        self._write()

    def text(self, name: str, text: str) -> None:
        """Keep a text beside the result."""
        (self.folder / name).write_text(text, encoding="utf-8")

    def log(self, name: str, text: str) -> None:
        """Keep a log that is to be among the recorded ones, under this name."""
        self.text(f"{name}.log", text)
        self._result["logs"][name] = f"{name}.log"
        self._write()

    def bundle(self, run: ddpkit.Run, page: str) -> None:
        """Keep a run, to be shown as what failure `page` of the catalog looks like on a GPU."""
        self.text(f"{page}.txt", f"{run.facts}\n{run}\n")
        run.bundle(self.folder / f"{page}.zip")
        self._result["bundles"][page] = f"{page}.zip"
        self._write()

    def sharing(self, **options: Any) -> dict[str, Any]:
        """Options of `launch` for ranks that share the GPU; in the dry run they use gloo."""
        options = {"show": False, "stall": self.stall_s, "timeout": 45, **options}
        return options | ({"backend": "gloo"} if self.dry else {"backend": "nccl", "share_gpu": True})

    def one_rank(self, **options: Any) -> dict[str, Any]:
        """Options of `launch` for one rank that has the GPU."""
        return {"show": False, "timeout": 60, "nproc": 1, "backend": "gloo" if self.dry else "nccl", **options}

    def _write(self) -> None:
        part = self.folder / "result.part"
        part.write_text(json.dumps(self._result, indent=1, default=str), encoding="utf-8")
        part.replace(self.folder / "result.json")


def main(cases: Mapping[str, Any]) -> None:
    """Run the function of that file which the command line names: `python FILE CASE FOLDER`."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    os.chdir(folder)
    cases[name](Step(name, folder, os.environ.get("GPU_DAY_DRY") == "1"))


def needs_gpu(case: Callable[[Step], None]) -> Callable[[Step], None]:
    """A case that the dry run leaves out."""

    def left_out_in_dry_run(step: Step) -> None:
        step.see(NEEDS_GPU) if step.dry else case(step)

    return left_out_in_dry_run


def command(step: Step, *words: str, env: Mapping[str, str] | None = None, limit_s: float = 60) -> tuple[int, str]:
    """Run a command to its end: its exit code, -1 where it had to be ended, and all that it wrote."""
    output = step.folder / f"output_{time.monotonic_ns()}.part"
    with open(output, "wb") as file:
        process = subprocess.Popen(
            words, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(20)
            code = -1
    text = output.read_text(encoding="utf-8", errors="replace")
    output.unlink()
    return code, text


def ddpkit_command(step: Step, *words: str, **options: Any) -> tuple[int, str]:
    """The `ddpkit` command, as a reader calls it."""
    program = "from ddpkit.cli import main; main()"
    return command(step, sys.executable, "-c", program, *words, **options)


def torchrun(step: Step, ranks: int, *words: str, **options: Any) -> tuple[int, str]:
    """Plain torchrun on this host."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return command(step, *start, *words, **options)


def watched(run: ddpkit.Run) -> float:
    """Wait for the end of a live run: after how many seconds the rank that is at fault in the end was named for good."""
    began, named, since = time.monotonic(), run.culprit, 0.0
    while run.state == "running":
        if run.culprit != named:
            named, since = run.culprit, time.monotonic() - began
        time.sleep(0.3)
    if run.wait().culprit != named:
        since = time.monotonic() - began
    return round(since, 1)


def told(text: str, *words: str) -> str:
    """The first line of `text` with the first of these words that is in it at all; "" where none is. Cut for a table."""
    for word in words:
        for line in text.splitlines():
            if word in line:
                return line.strip()[:200]
    return ""


def page_of(run: ddpkit.Run) -> str:
    """The page that a run's diagnosis names, "no page" where there is none."""
    return run.diagnosis.name if run.diagnosis else "no page"
