"""Pack the workbook for students: what git knows, without solutions, tests and outputs, and with answers not to be read."""

from __future__ import annotations

import base64
import subprocess
import zipfile
import zlib
from pathlib import Path

from ddpkit.course.exercises import SEAL
from ddpkit.course.student import without_outputs

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = (
    *("solutions/", "tests/", "benchmarks/", ".ci/", "tools/make_exercises.py", "tools/student_archive.py"),
    *("tools/gpu_", "tools/take_gpu_day.py", "docs/instructors.md"),
)
NAME = "ddp-workbook"


def main() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    chosen = [name for name in listed.split("\0") if name and not name.startswith(LEFT_OUT)]
    target = ROOT / "dist" / f"{NAME}.zip"
    target.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in chosen:
            entry = zipfile.ZipInfo.from_file(ROOT / name, f"{NAME}/{name}")
            archive.writestr(entry, for_students(ROOT / name), zipfile.ZIP_DEFLATED)
    print(f"{target.relative_to(ROOT)}: {len(chosen)} files")


def for_students(path: Path) -> bytes:
    """What a student gets of a file: a notebook without outputs, a task whose answers are not in plain text."""
    if path.suffix == ".ipynb":
        return without_outputs(path.read_text(encoding="utf-8")).encode()
    content = path.read_bytes()
    return SEAL + base64.b64encode(zlib.compress(content)) if path.name in ("task.toml", "questions.toml") else content


if __name__ == "__main__":
    main()
