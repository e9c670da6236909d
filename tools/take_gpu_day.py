"""Put the recordings of `gpu_day.py` in place: `take_gpu_day.py gpu-day.zip [MORE.zip]`.

Runs go beside their pages as ddpkit/catalog/<failure>/gpu.zip, logs to tests/recorded/gpu/, and docs/gpu.md is written. What
tells of the machine is taken out, and each recording says with which versions and by which ranks it was made. A dry run is
taken only into another folder (--into).
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_plan import ENVIRONMENTS

ROOT = Path(__file__).resolve().parents[1]
# What no recording may hold, wherever it was made: the names of GPUs, and addresses in the machine's own network.
OF_A_MACHINE = (
    (re.compile(r"\bGPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "GPU-0"),
    (re.compile(r"\b(?:10|172\.(?:1[6-9]|2\d|3[01])|192\.168|169\.254)(?:\.\d{1,3}){2,3}\b"), "192.0.2.1"),
    (re.compile(r"\bfe80::[0-9a-f:]+"), "fe80::1"),
)
TEXTS = {".json", ".jsonl", ".log", ".txt", ".py", ".md", ""}


@dataclass(frozen=True)
class Taken:
    """A step as one of the zips has it: its record, its files, and what tells of the machine it ran on."""

    record: dict[str, Any]
    files: dict[str, bytes]
    day: dict[str, Any]

    @property
    def where(self) -> str:
        return ENVIRONMENTS[self.record["environment"]]

    def clean(self, text: str) -> str:
        return cleaned(text, self.day["places"])

    def text(self, name: str) -> str:
        return self.clean(self.files[name].decode("utf-8", "replace"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zips", nargs="+", type=Path, help="in the order in which they were made")
    parser.add_argument("--into", type=Path, help="another folder than this checkout, for a dry run")
    asked = parser.parse_args()
    steps = merged([read(path) for path in asked.zips])
    if asked.into is None and any(step.day["dry"] for step in steps):
        sys.exit("take_gpu_day: this is of a dry run, which recorded nothing of a GPU; give --into FOLDER to try it.")
    into = asked.into or ROOT
    versions = versions_of(steps)
    bundles = [
        put_bundle(into, step, page, name, versions) for step in steps for page, name in step.record["bundles"].items()
    ]
    logs = [put_log(into, step, name, file) for step in steps for name, file in step.record["logs"].items()]
    put(into / "docs" / "gpu.md", page_of(steps, versions).encode())
    print(f"{into}: {len(bundles)} runs, {len(logs)} logs, docs/gpu.md.")
    print(
        "Then: enter what each log tells in tests/recorded/logs.toml, as below where that is right, and `make notebooks`.\n"
    )
    print("\n".join(logs))


def read(path: Path) -> list[Taken]:
    """The steps in one zip."""
    with zipfile.ZipFile(path) as archive:
        day = json.loads(archive.read("day.json"))
        files: dict[str, dict[str, bytes]] = {}
        for name in archive.namelist():
            step, _, file = name.partition("/")
            if file:
                files.setdefault(step, {})[file] = archive.read(name)
    return [Taken(json.loads(found["step.json"]), found, day) for found in files.values()]


def merged(days: Sequence[Sequence[Taken]]) -> list[Taken]:
    """One of each step, in the order of their numbers: the last that was done, or else the last that was tried."""
    best: dict[str, Taken] = {}
    for step in (step for day in days for step in day):
        name = step.record["name"]
        if name not in best or step.record["state"] == "done" or best[name].record["state"] != "done":
            best[name] = step
    return sorted(best.values(), key=lambda step: step.record["number"])


def versions_of(steps: Sequence[Taken]) -> str:
    """`one NVIDIA H200, torch 2.11.0, CUDA 13.0, NCCL 2.28.9, driver 580.1`."""
    found: dict[str, Any] = next((s.record["figures"] for s in steps if s.record["name"] == "versions"), {})
    names = {"torch": "torch", "CUDA": "cuda", "NCCL": "nccl", "driver": "driver"}
    parts = [f"{name} {found[key]}" for name, key in names.items() if found.get(key)]
    return ", ".join([f"one {found['gpu']}" if found.get("gpu") else "a machine without a GPU", *parts])


# What is put where.


def put_bundle(into: Path, step: Taken, page: str, name: str, versions: str) -> Path:
    """A run, cleaned, with where it was recorded as its first note."""
    label = f"recorded on {versions}; {step.where}"
    made = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(step.files[name])) as bundle,
        zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as out,
    ):
        for entry in bundle.namelist():
            out.writestr(entry, labelled(entry, bundle.read(entry), step, label))
    return put(into / "ddpkit" / "catalog" / page / "gpu.zip", made.getvalue())


def labelled(entry: str, data: bytes, step: Taken, label: str) -> bytes:
    """One file of a run's folder."""
    if Path(entry).suffix not in TEXTS:
        return data
    text = step.clean(data.decode("utf-8", "replace"))
    if Path(entry).name == "job.json":
        job = json.loads(text)
        job["notes"] = [label, *job["notes"]]
        text = json.dumps(job, indent=1)
    return text.encode()


def put_log(into: Path, step: Taken, name: str, file: str) -> str:
    """A log, cleaned; and what is to be said of it in tests/recorded/logs.toml, as ddpkit reads it."""
    import ddpkit

    path = put(into / "tests" / "recorded" / "gpu" / f"{name}.log", step.text(file).encode())
    found = ddpkit.diagnose(path)
    rank = f"rank = {json.dumps(found.rank)}\n" if found.rank is not None else ""
    return f'[[log]]\nfile = "gpu/{name}.log"\nfailure = "{found.name}"\n{rank}by = "{step.where}"\n'


def page_of(steps: Sequence[Taken], versions: str) -> str:
    """docs/gpu.md: a line for each step, and the tables that some have."""
    days = {(step.day["at"], step.day["commit"]) for step in steps}
    made = " and ".join(f"on {at}, at commit {commit}" for at, commit in sorted(days))
    dry = "**A dry run: nothing here is of a GPU.** " if any(step.day["dry"] for step in steps) else ""
    lines = [
        "# What was recorded on one GPU",
        "",
        f"{dry}`tools/gpu_day.py` ran {made}, on {versions}. `tools/take_gpu_day.py` wrote this page. Where ranks posed as",
        "hosts of their own, a lost peer is reported as a lost host. A collective was given 10 s, and",
        "torch's watchdog 6 s more for its dump in place of a minute, but in the step \"with torch's own waiting times\".",
        "",
        "| | step | how it ended | what was seen | s | where the ranks were |",
        "|:--|:--|:--|:--|--:|:--|",
    ]
    for step in steps:
        found = step.record
        seen = step.clean(found["seen"]).replace("|", "/")
        cells = (found["number"], found["title"], found["state"], seen, found["seconds"], step.where)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for step in steps:
        for name in sorted(name for name in step.files if name.endswith(".md")):
            title = step.record["title"]
            lines += [
                "",
                f"## {title[0].upper()}{title[1:]}",
                "",
                f"{versions}; {step.where}.",
                "",
                step.text(name).rstrip(),
            ]
    return "\n".join([*lines, ""])


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def cleaned(text: str, places: Mapping[str, str]) -> str:
    """`text` without what tells of the machine: its paths, the longest first, its name, and its user's."""
    for name in sorted(places, key=len, reverse=True):
        text = as_a_word(name).sub(places[name], text)
    for pattern, instead in OF_A_MACHINE:
        text = pattern.sub(instead, text)
    return text


def as_a_word(name: str) -> re.Pattern[str]:
    """A path or a name where it is not a part of another one."""
    before = "" if name.startswith("/") else r"(?<![\w.-])"
    return re.compile(rf"{before}{re.escape(name)}(?![\w-])")


if __name__ == "__main__":
    main()
