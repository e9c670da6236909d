"""Makes, deletes, packs and unpacks run folders, and finds the logs in them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpkit.errors import LaunchError

from . import wire

DEFAULT_KEPT_RUNS = 100


def home() -> Path:
    """The folder of all runs: $DDPKIT_HOME, or .ddpkit in the working directory."""
    return Path(os.environ.get(wire.ENV_HOME) or Path.cwd() / ".ddpkit").expanduser().resolve()


def new_run_folder(name: str) -> Path:
    """An empty folder for a run of job `name`; deletes the oldest runs above the cap.

    Raises:
        LaunchError: it cannot be made there.
    """
    runs = home() / "runs"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        ignore = home() / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", encoding="utf-8")
        _prune(runs)
        return _made(runs, name)
    except OSError as error:
        raise LaunchError(
            f"launch: the run folder cannot be made in {runs} ({error.strerror}); make room there or allow writing, "
            f"or set {wire.ENV_HOME} to another folder."
        ) from None


def packed(run: Path, target: str | Path | None, summary: str) -> Path:
    """Write the run folder `run` into a zip and return its path; `target`: a file, a folder, or None for here."""
    path = Path(target) if target else Path(f"{run.name}.zip")
    if path.is_dir():
        path = path / f"{run.name}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(run.rglob("*")):
            name = str(Path(run.name) / file.relative_to(run))
            if file.is_file() and file.name not in (*wire.PICKLED, wire.BALLAST):
                archive.write(file, name)
            elif file.is_fifo():
                # The pipe's name says that the rank's process group came up.
                archive.writestr(name, "")
        archive.writestr(f"{run.name}/summary.txt", f"{summary}\n")
    return path.resolve()


def found_run(folder: str | Path) -> Path:
    """The run folder `folder`, or that of a zip, which is unpacked.

    Raises:
        FileNotFoundError: no run is there.
    """
    path = Path(folder).expanduser().resolve()
    if zipfile.is_zipfile(path):
        path = unpacked(path)
    if not (path / wire.JOB).exists():
        raise FileNotFoundError(f"Run.from_folder: {path} holds no {wire.JOB}; give a folder below .ddpkit/runs/.")
    return path


def unpacked(bundle: Path) -> Path:
    """Unpack a zip that `Run.bundle` wrote, without pickled values, and return its run folder.

    Raises:
        FileNotFoundError: no run is in it.
    """
    with zipfile.ZipFile(bundle) as archive:
        named = [name for name in archive.namelist() if Path(name).name not in wire.PICKLED]
        run = next((Path(name).parent for name in named if Path(name).name == wire.JOB), None)
        if run is None:
            raise FileNotFoundError(
                f"Run.from_folder: {bundle} holds no {wire.JOB}; give a zip that run.bundle() wrote."
            )
        folder = home() / "bundles" / run
        if not folder.exists():
            archive.extractall(folder.parent, named)
    return folder


def _made(runs: Path, name: str) -> Path:
    """A new folder, named by millisecond and job: the oldest sorts first."""
    job = re.sub(r"[^0-9A-Za-z_.-]+", "_", name)[:40]
    while True:
        now_ms = time.time_ns() // 1_000_000
        moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_ms // 1000))
        folder = runs / f"{moment}-{now_ms % 1000:03d}-{job}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
        time.sleep(0.001)


def _prune(runs: Path) -> None:
    """Delete the oldest finished runs above the cap."""
    kept = int(os.environ.get(wire.ENV_KEEP_RUNS, DEFAULT_KEPT_RUNS))
    over = sorted(folder for folder in runs.iterdir() if _is_over(folder))
    for folder in over[: max(0, len(over) - kept + 1)]:
        shutil.rmtree(folder, ignore_errors=True)


def _is_over(folder: Path) -> bool:
    """Whether the run has ended, or the process that launched it is gone; a job on Slurm goes on without that process."""
    if (folder / wire.END).exists():
        return True
    spec = wire.read_record(folder / wire.JOB) or {}
    launched_by = spec.get("launched_by")
    return launched_by is not None and not spec.get("slurm") and not Path(f"/proc/{launched_by}").exists()


def log_folder(folder: Path, attempt: int, started: Mapping[str, Any]) -> Path | None:
    """torchrun's log folder of a rank with this first record: logs/<run id>/attempt_<n>/<local rank>; None before it exists."""
    logs = wire.node_folder(folder, started.get("node", "")) / wire.LOGS
    return next(iter(logs.glob(f"*/attempt_{attempt}/{started['local_rank']}")), None)


def log_text(path: Path) -> str:
    """A log file as text; if the cap has cut a hole into it, one line says how much is missing."""
    try:
        with open(path, "rb") as file:
            return b"".join(_around_the_hole(file, path)).decode("utf-8", "replace")
    except OSError:
        return ""


def _around_the_hole(file: Any, path: Path) -> list[bytes]:
    cut = wire.read_record(path.with_suffix(".cut.json"))
    if not cut:
        return [file.read()]
    head = file.read(cut["from"])
    file.seek(cut["to"])
    notice = (
        f"\n[ddpkit: {(cut['to'] - cut['from']) >> 20} MiB are missing here: {wire.ENV_LOG_CAP}={cut['cap_mib']}]\n"
    )
    return [head, notice.encode(), file.read()]
