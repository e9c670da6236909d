"""Run notebooks and store their outputs in place, free of what varies: widget views, times, versions."""

from __future__ import annotations

import argparse
import base64
import os
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from view_picture import CHROMIUM, few_colours, pictures

ROOT = Path(__file__).resolve().parents[1]
# Without the widget's state a stored view is shown as an error; a picture takes its place, which nbval does not compare.
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
CELL_TIMEOUT_S = 300
ANSWERS = {"DDPKIT_ANSWERS": str(ROOT / "tests" / "answers.toml")}


def main() -> None:
    failed = [path for path in chosen() if not store(path)]
    if failed:
        sys.exit(f"Not stored: {', '.join(map(shown, failed))}. The reasons are above; the files are as they were.")


def chosen() -> list[Path]:
    parser = argparse.ArgumentParser(description="Run notebooks and store their outputs in place.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: every notebook and solution")
    given = parser.parse_args().notebooks
    every = [path for folder in ("notebooks", "solutions") for path in sorted((ROOT / folder).glob("*.ipynb"))]
    return [path.resolve() for path in given] or every


def store(path: Path) -> bool:
    """Run one notebook in its own folder and write it back; False, with the reason printed, when that cannot be."""
    notebook = nbformat.read(path, as_version=4)
    began_s = time.monotonic()
    problem = run(notebook, path.parent)
    if problem is None:
        draw_views(notebook)
        clean(notebook)
        problem = workplace_in(notebook)
    print(f"{shown(path)}: {time.monotonic() - began_s:.0f} s, {problem or 'stored'}", flush=True)
    if problem is None:
        nbformat.write(notebook, path)
    return problem is None


def run(notebook: nbformat.NotebookNode, folder: Path) -> str | None:
    """Execute every cell with this Python's own kernel; what went wrong, or None."""
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        store_widget_state=True,
        coalesce_streams=True,
        extra_arguments=["--IPKernelApp.log_level=40"],  # or every kernel warns of its loopback ports
    )
    try:
        client.execute(env={**os.environ, **ANSWERS})
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        return f"a cell failed:\n{error}"
    return None


def draw_views(notebook: nbformat.NotebookNode) -> None:
    """A picture beside each live view, from the state that its widget ended with; figures get a small palette."""
    states = notebook.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {}).get("state", {})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    for output in outputs:
        if "image/png" in output.data:
            output.data["image/png"] = encoded(few_colours(base64.b64decode(output.data["image/png"])))
    shown = {id(o): states.get(o.data.get(WIDGET_VIEW, {}).get("model_id"), {}).get("state", {}) for o in outputs}
    views = [output for output in outputs if shown[id(output)].get("final", {}).get("over")]
    if views and CHROMIUM is None:
        print("Without chromium the live views are stored without a picture.", flush=True)
        return
    for output, png in zip(views, pictures([shown[id(output)] for output in views]), strict=True):
        output.data["image/png"] = encoded(png)
        output.metadata["image/png"] = {"alt": in_words(**shown[id(output)])}


def in_words(job: dict[str, Any], final: dict[str, Any], **_: Any) -> str:
    ranks = (f"rank {rank}: {words}" for rank, _role, words, *_ in final["endings"])
    return f"{job['name']}, {final['state']}; {'; '.join(ranks)}"


def encoded(png: bytes) -> str:
    return base64.b64encode(png).decode()


def clean(notebook: nbformat.NotebookNode) -> None:
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not is_bare_view(output)]
            for output in cell.outputs:
                output.get("data", {}).pop(WIDGET_VIEW, None)


def is_bare_view(output: Any) -> bool:
    """A widget view with no other form to fall back on."""
    return set(output.get("data", {})) == {WIDGET_VIEW}


def workplace_in(notebook: nbformat.NotebookNode) -> str | None:
    """Outputs go to readers: a path of the machine that made them has no place there."""
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and any(str(ROOT) in str(output) for output in cell.outputs):
            return f"the output of cell {number} shows a path of this machine ({ROOT})"
    return None


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


if __name__ == "__main__":
    main()
