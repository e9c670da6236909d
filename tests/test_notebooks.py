"""What the notebooks hold: the programs of their labs word for word, outputs that show no widget state, a bearable size."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from ddpkit.course.lab import lab

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted([*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "solutions").glob("*.ipynb")])
MOST_BYTES = 200 * 1024
IN_COURSE = ("01", "02", "03", "04", "05", "06", "07", "08", "09", "10", "11", "12")


def shown(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=shown)
def test_a_notebook_is_read_in_a_quarter_of_an_hour(path: Path) -> None:
    """At 200 words and 25 lines of code a minute, and half a minute for each figure or view."""
    words, lines, pictures = 0, 0, 0
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            words += len(cell.source.split())
        else:
            lines += sum(bool(line.strip()) for line in cell.source.splitlines())
            pictures += any("image/png" in output.get("data", {}) for output in cell.outputs)
    assert words / 200 + lines / 25 + pictures / 2 <= 15, f"{words} words, {lines} lines of code, {pictures} pictures"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=shown)
def test_a_notebook_is_small_and_stored(path: Path) -> None:
    assert path.stat().st_size <= MOST_BYTES, f"{path.stat().st_size} bytes"
    cells = nbformat.read(path, as_version=4).cells
    code = [c for c in cells if c.cell_type == "code"]
    assert code and all(c.execution_count for c in code), "run `make notebooks`: a cell has no stored outputs"
    assert not any("widget-view" in key for c in code for o in c.outputs for key in o.get("data", {}))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=shown)
def test_a_cell_that_shows_a_lab_is_its_program(path: Path) -> None:
    cells = [c for c in nbformat.read(path, as_version=4).cells if "lab" in c.metadata]
    if path.parent.name == "notebooks" and path.name[:2] in IN_COURSE:
        assert cells, "none of its cells is named as a lab's program"
    for cell in cells:
        magic, _, program = cell.source.partition("\n")
        assert magic.startswith("%%torchrun ")
        assert program.strip() == lab(cell.metadata["lab"]).program.strip(), cell.metadata["lab"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=shown)
def test_every_claim_has_its_cell(path: Path) -> None:
    """Long runs of prose without a cell between them are where claims go unshown."""
    run, longest = 0, 0
    for cell in nbformat.read(path, as_version=4).cells:
        run = run + len(cell.source.split()) if cell.cell_type == "markdown" else 0
        longest = max(longest, run)
    assert longest <= 260, f"{longest} words without a cell"


@pytest.mark.job
@pytest.mark.browser
def test_a_launch_is_stored_with_a_picture_of_its_lanes(home: Path) -> None:
    """For pages that draw no widgets; nbval compares no picture."""
    if not (shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("no chromium on this machine")
    source = (
        "import ddpkit\nddpkit.FixBench('skipped_collective').run(show=True)\nrun = ddpkit.launch(print, ('hello',))"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    nbformat.write(notebook, home / "one.ipynb")
    subprocess.run([sys.executable, ROOT / "tools" / "store_outputs.py", home / "one.ipynb"], check=True)
    views = [o for o in nbformat.read(home / "one.ipynb", as_version=4).cells[0].outputs if "image/png" in o.data]
    assert [set(o.data) for o in views] == [{"text/plain", "image/png"}] * 2
    assert views[0].metadata["image/png"].alt.startswith("skipped_collective, hung; rank 0: waits in all_reduce #10")
    assert views[1].metadata["image/png"].alt == "print, passed; rank 0: passed; rank 1: passed"
    assert all(2_000 < len(o.data["image/png"]) < 30_000 for o in views)


def test_the_sections_that_the_coverage_page_names_are_in_their_notebooks() -> None:
    page = (ROOT / "docs" / "coverage.md").read_text()
    for number, names in re.findall(r'notebook (\d\d), ((?:"[^"]+"(?: and |, )?)+)', page):
        (path,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
        texts = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
        headings = re.findall(r"^#+ (.+)$", "\n".join(texts), flags=re.MULTILINE)
        assert not set(re.findall(r'"([^"]+)"', names)) - set(headings), (
            f"notebook {number} has no such section: {names}"
        )
