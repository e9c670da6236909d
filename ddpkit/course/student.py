"""`ddpkit start 02`: the reader's own copy of a lesson and its exercise, without outputs, in `work/`."""

from __future__ import annotations

import json
from pathlib import Path

from ddpkit.errors import LaunchError

from .exercises import workbook

OWN = "work"


def start(number: str = "", here: Path | None = None) -> list[Path]:
    """Copy the lesson whose name begins with `number`, and its exercise, into `work/` of the workbook; all without a number.

    Outputs are left out: they hold the answers. A copy that is there already stays as it is. Returns the copies' paths.

    Raises:
        LaunchError: there is no such lesson, or no workbook at or above this folder.
    """
    here = here or Path.cwd()
    if (book := workbook(here)) is None:
        raise LaunchError(f"start: {here} is not inside the workbook; change into the folder that holds notebooks/.")
    lessons = sorted((book / "notebooks").glob("*.ipynb"))
    wanted = [path for path in lessons if path.name.startswith(f"{number.zfill(2)}_" if number else "")]
    if not wanted:
        there = ", ".join(path.name.partition("_")[0] for path in lessons)
        raise LaunchError(f"start: there is no lesson {number!r}; there are {there or 'none'}.")
    copies = []
    for lesson in wanted:
        copies.append(_copied(lesson, book / OWN / lesson.name))
        exercise = book / "exercises" / lesson.name
        if exercise.exists():
            copies.append(_copied(exercise, book / OWN / "exercises" / lesson.name))
    return copies


def _copied(notebook: Path, copy: Path) -> Path:
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(without_outputs(notebook.read_text(encoding="utf-8")), encoding="utf-8")
    return copy


def without_outputs(notebook: str) -> str:
    """The text of a notebook, with every output and execution count taken out."""
    found = json.loads(notebook)
    for cell in found["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"
