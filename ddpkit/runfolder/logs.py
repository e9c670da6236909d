"""Finds and reads the log files that torchrun keeps of a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import wire


def log_folder(folder: Path, attempt: int, local_rank: int) -> Path | None:
    """torchrun's log folder of a rank: logs/<run id>/attempt_<n>/<local rank>; None before it exists."""
    return next(iter((folder / wire.LOGS).glob(f"*/attempt_{attempt}/{local_rank}")), None)


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
