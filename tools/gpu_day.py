"""Record on a machine with one GPU all that the course says of GPUs: `gpu_day.py OUT --first`, then `gpu_day.py OUT`.

It installs the kit of `make gpu-kit` and runs the steps of `gpu_plan.py`, each in processes of its own that end with it. What
a step has left is in OUT/gpu-day.zip as soon as it ends. `--dry` runs all of it on the CPU, with gloo where a step allows it.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any

from gpu_plan import ENVIRONMENTS, FIRST, REST, Step
from gpu_setup import Setup, prepare

ROOT = Path(__file__).resolve().parents[1]
# In all, of a call; what a step needs at least to be begun; and what is kept back for the last lines.
FIRST_S, REST_S, DRY_S = 85, 470, 340
LEAST_S, LAST_S = 12, 4
# Every process of a step carries it in its environment: so all are found, whatever session they have put themselves in.
MARK = "GPU_DAY_STEP"
ABREAST = max(2, min(4, (os.cpu_count() or 2) // 2))
MOST_FILE_BYTES, MOST_ZIP_BYTES = 3 << 20, 15 << 20


class Day:
    """One call: its folder, its time, the environment of its steps, and its zip."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.dry, self.first = asked.dry, asked.first
        self.began = time.monotonic()
        self.limit_s = asked.limit_s or (DRY_S if asked.dry else FIRST_S if asked.first else REST_S)
        self.setup = prepare(self.dry)
        self.out = Path(asked.out).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.zip = self.out / "gpu-day.zip"
        # A short path: sockets of the steps' processes are below it.
        self.work = Path(tempfile.mkdtemp(prefix="gpu-day-"))
        self.rows: list[dict[str, Any]] = []
        self.settings: dict[str, dict[str, str]] = {"sockets": {}, "host": {}}
        self.missing: dict[str, str] = {}
        self._lock = Lock()
        self._begin_zip()

    def left_s(self) -> float:
        return self.limit_s - LAST_S - (time.monotonic() - self.began)

    def run(self, plan: tuple[Step, ...]) -> None:
        """Run one group of steps after the other, those of a group side by side."""
        for _, group in groupby(plan, key=lambda step: step.group):
            with ThreadPoolExecutor(ABREAST) as pool:
                running = [pool.submit(self._step, step) for step in group]
                try:
                    for step in running:
                        self._wait(step)
                except KeyboardInterrupt:
                    pool.shutdown(wait=False, cancel_futures=True)
                    end_all(self.work.name)
                    raise

    def _wait(self, step: Future[None]) -> None:
        """Whatever becomes of one step, the day goes on."""
        try:
            step.result()
        except Exception as error:
            print(f"gpu_day: {type(error).__name__}: {error}", flush=True)

    def _step(self, step: Step) -> None:
        """Run one step, or say why not, and put what it has left into the zip."""
        folder = self.work / "steps" / step.name
        folder.mkdir(parents=True)
        state, seconds = self._why_not(step), 0.0
        if not state:
            began = time.monotonic()
            state = self._process(step, folder, min(step.limit_s, self.left_s()))
            seconds = round(time.monotonic() - began, 1)
        self._finish(step, folder, state, seconds)

    def _why_not(self, step: Step) -> str:
        if self.left_s() < LEAST_S:
            return "not run: no time left"
        if step.environment == "host" and not self.setup.nccl and not self.dry:
            return "not run: no newer NCCL in the kit"
        why = "" if step.tries else self.missing.get(step.environment, "")
        return f"not run: {why}" if why else ""

    def _process(self, step: Step, folder: Path, limit_s: float) -> str:
        """Run the step's own process to its end or its limit: how it ended. Nothing of it stays."""
        mark = f"{self.work.name}/{step.name}"
        (self.work / "tmp" / step.name).mkdir(parents=True)
        env = {**os.environ, **self.setup.env, **self.settings.get(step.environment, {}), MARK: mark}
        env |= {"DDPKIT_HOME": str(self.work / "runs" / step.name), "TMPDIR": str(self.work / "tmp" / step.name)}
        file, case = step.words
        words = [sys.executable, "-u", str(ROOT / "tools" / "gpu_steps" / f"{file}.py"), case, str(folder)]
        with open(folder / "output.txt", "wb") as output:
            process = subprocess.Popen(
                words,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
                state = "done" if code == 0 else f"failed: exit code {code}"
            except subprocess.TimeoutExpired:
                state = f"ended at its limit of {limit_s:.0f} s"
            end_all(mark)
            process.wait()
        return state

    def _finish(self, step: Step, folder: Path, state: str, seconds: float) -> None:
        result = read_json(folder / "result.json")
        figures = result.get("figures", {})
        if step.tries:
            self._go_by(step, state, figures)
        last = tail(folder / "output.txt") if state.startswith("failed") else ""
        record = {
            "name": step.name,
            "number": step.number,
            "title": step.title,
            "state": state,
            "seconds": seconds,
            "seen": "; ".join(filter(None, [result.get("seen", ""), last])),
            "environment": "cpu" if self.dry and step.environment else step.environment,
            "figures": figures,
            "bundles": result.get("bundles", {}),
            "logs": result.get("logs", {}),
        }
        (folder / "step.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        with self._lock:
            self.rows.append(record)
            self._add(folder)
            print(f"{time.monotonic() - self.began:5.0f} s  {step.name}: {state}. {record['seen'][:150]}", flush=True)

    def _go_by(self, step: Step, state: str, figures: Mapping[str, Any]) -> None:
        """By which settings the steps after it may go on, or that they cannot."""
        if state == "done" and figures.get("exitcode", 0) == 0:
            self.settings[step.environment] = figures.get("settings", {})
        else:
            self.missing[step.environment] = f"{step.title} did not pass"

    # The zip, which is whole at every moment.

    def _begin_zip(self) -> None:
        about = {"dry": self.dry, "call": "first" if self.first else "rest", "at": time.strftime("%Y-%m-%d")}
        about |= {"commit": self.setup.commit, "places": places(self.setup, self.work)}
        part = self.zip.with_suffix(".part")
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("day.json", json.dumps(about, indent=1))
        part.replace(self.zip)

    def _add(self, folder: Path) -> None:
        """Put what a step has left into the zip; a file that is too large is left out, and named."""
        part = self.zip.with_suffix(".part")
        shutil.copyfile(self.zip, part)
        left_out = []
        with zipfile.ZipFile(part, "a", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(path for path in folder.iterdir() if path.is_file()):
                if path.stat().st_size > MOST_FILE_BYTES or part.stat().st_size > MOST_ZIP_BYTES:
                    left_out.append(f"{path.name}: {path.stat().st_size} bytes\n")
                else:
                    archive.write(path, f"{folder.name}/{path.name}")
            if left_out:
                archive.writestr(f"{folder.name}/left_out.txt", "".join(left_out))
        part.replace(self.zip)

    def end(self) -> str:
        """Leave nothing behind; the table, which is in the zip too."""
        end_all(self.work.name)
        shutil.rmtree(self.work, ignore_errors=True)
        found = table(self.rows)
        with zipfile.ZipFile(self.zip, "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("table.txt", found)
        return found


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each step: its number, how it ended, what was seen, and where the ranks were."""
    lines = []
    for row in rows:
        where = ENVIRONMENTS[row["environment"]].partition(",")[0]
        lines.append(
            f"{row['number']}  {row['name']:<20} {row['state']:<22.22} {row['seconds']:5.1f} s  {row['seen'][:110]} [{where}]"
        )
    done = sum(row["state"] == "done" for row in rows)
    return "\n".join([*lines, f"{done} of {len(rows)} steps done.", ""])


def places(setup: Setup, work: Path) -> dict[str, str]:
    """What tells of this machine, and what is to stand for it in a recording; see `take_gpu_day.py`."""
    found = {
        str(work): "/home/you/gpu-day",
        str(ROOT): "/home/you/ddp-workbook",
        setup.site: "/home/you/.venv/lib/python3/site-packages",
        sys.prefix: "/home/you/.venv",
        sys.base_prefix: "/usr",
        str(Path.home()): "/home/you",
        socket.gethostname(): "host",
        platform.release(): "kernel",
    }
    if getpass.getuser() != "root":
        found[getpass.getuser()] = "you"
    return {name: instead for name, instead in found.items() if name not in ("", "/", "/usr", "localhost")}


def end_all(mark: str) -> None:
    """End every process whose environment carries `mark`, first gently, and wait until none is left."""
    for number, patience_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        until = time.monotonic() + patience_s
        while (pids := marked(mark)) and time.monotonic() < until:
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
            time.sleep(0.1)


def marked(mark: str) -> list[int]:
    """The living processes of the step, or of the whole day, that `mark` stands for."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if any(entry.startswith(wanted) for entry in (folder / "environ").read_bytes().split(b"\0")):
                    found.append(int(folder.name))
    return found


def tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1].strip()[:200] if lines else ""


def read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="the folder that gets gpu-day.zip")
    parser.add_argument("--first", action="store_true", help="the first call: imports, one stack, the smoke tests")
    parser.add_argument("--dry", action="store_true", help="on the CPU, to see that all of it works")
    parser.add_argument("--only", default="", metavar="STEPS", help="these steps alone, by comma")
    parser.add_argument(
        "--limit-s", type=float, metavar="S", help=f"in all; by default {FIRST_S}, or {REST_S} for the rest"
    )
    return parser.parse_args()


def main() -> None:
    asked = parsed()
    plan = FIRST if asked.first else REST
    if asked.only:
        chosen = asked.only.split(",")
        plan = tuple(step for step in (*FIRST, *REST[1:]) if step.name in chosen)
        if len(plan) < len(chosen):
            sys.exit(f"gpu_day: --only {asked.only} names a step that there is not; see tools/gpu_plan.py.")
    day = Day(asked)
    try:
        day.run(plan)
    finally:
        print(f"\n{day.end()}{day.zip}: {day.zip.stat().st_size / 2**20:.1f} MiB, {time.monotonic() - day.began:.0f} s")


if __name__ == "__main__":
    main()
