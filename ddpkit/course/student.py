"""`ddpkit start 02`: a student's own copy of an exercise, in a folder that updates of the workbook never touch."""

from __future__ import annotations

import shutil
from pathlib import Path

from ddpkit.errors import LaunchError

from .exercises import workbook

OWN = "work"


def start(number: str, here: Path | None = None) -> Path:
    """Copy the exercise whose name begins with `number` into `work/` of the workbook, and return the copy's path.

    A copy that is there already stays as it is.

    Raises:
        LaunchError: there is no such exercise, or no workbook at or above this folder.
    """
    here = here or Path.cwd()
    if (book := workbook(here)) is None:
        raise LaunchError(f"start: {here} is not inside the workbook; change into the folder that holds notebooks/.")
    known = sorted((book / "exercises").glob("*.ipynb"))
    wanted = [path for path in known if path.name.startswith(f"{number.zfill(2)}_")]
    if not wanted:
        there = ", ".join(path.name.partition("_")[0] for path in known)
        raise LaunchError(f"start: there is no exercise {number!r}; there are {there or 'none'}.")
    copy = book / OWN / wanted[0].name
    if not copy.exists():
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(wanted[0], copy)
    return copy
