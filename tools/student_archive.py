"""Pack the workbook for students: every file that git knows, but for the solutions and the tests."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = (
    *("solutions/", "tests/", "benchmarks/", ".ci/", "tools/make_exercises.py", "tools/student_archive.py"),
    *("tools/gpu_", "tools/take_gpu_day.py"),
)
NAME = "ddp-workbook"


def main() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    chosen = [name for name in listed.split("\0") if name and not name.startswith(LEFT_OUT)]
    target = ROOT / "dist" / f"{NAME}.zip"
    target.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in chosen:
            archive.write(ROOT / name, f"{NAME}/{name}")
    print(f"{target.relative_to(ROOT)}: {len(chosen)} files")


if __name__ == "__main__":
    main()
