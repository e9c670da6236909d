"""Make `exercises/` from `solutions/`: nbgrader's own ClearSolutions takes out what is between its markers; outputs go."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import nbformat
from nbgrader.preprocessors import ClearOutput, ClearSolutions

ROOT = Path(__file__).resolve().parents[1]
SOLUTIONS, EXERCISES = ROOT / "solutions", ROOT / "exercises"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; say whether exercises/ is what solutions/ gives"
    )
    only_check = parser.parse_args().check
    stale = []
    for solution in sorted(SOLUTIONS.glob("*.ipynb")):
        made, target = exercise_of(solution), EXERCISES / solution.name
        if only_check:
            stale += [] if target.exists() and target.read_text(encoding="utf-8") == made else [target.name]
        else:
            EXERCISES.mkdir(exist_ok=True)
            target.write_text(made, encoding="utf-8")
    orphans = {p.name for p in EXERCISES.glob("*.ipynb")} - {p.name for p in SOLUTIONS.glob("*.ipynb")}
    if stale or orphans:
        sys.exit(f"Not what solutions/ gives: {', '.join([*stale, *sorted(orphans)])}. Run `make exercises`.")


def exercise_of(solution: Path) -> str:
    """The text of the exercise that a solution's notebook gives."""
    notebook = nbformat.read(solution, as_version=4)
    for preprocessor in (ClearSolutions(), ClearOutput()):
        notebook, _ = preprocessor.preprocess(notebook, {})
    return nbformat.writes(notebook) + "\n"


if __name__ == "__main__":
    main()
