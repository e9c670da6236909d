"""Record the labs that not every platform can run: a bundle of the program's run, shown where it cannot be had."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import ddpkit
from ddpkit.course.lab import Lab, labs
from ddpkit.runfolder import wire


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        os.environ[wire.ENV_HOME] = home
        for lab in labs():
            if lab.platforms != Lab.platforms:
                record(lab, Path(home, f"{lab.name}.py"))


def record(lab: Lab, script: Path) -> None:
    """Run the lab's program from `script`, a new file, and keep the run's bundle beside the program."""
    script.write_text(lab.program, encoding="utf-8")
    limits: dict[str, Any] = {"nproc": lab.nproc, "timeout": lab.timeout, "stall": lab.stall, "stop_on_stall": True}
    run = ddpkit.launch(script, backend="gloo", env=lab.env, show=False, **limits)
    found = (run.culprit, run.diagnosis and run.diagnosis.name)
    assert found == (lab.culprit, lab.page or lab.name), run
    print(f"{run.bundle(lab.recorded)}: {run.headline}")


if __name__ == "__main__":
    main()
