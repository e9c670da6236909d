"""Step 6: the tests that need a GPU, and the labs of the core path on ranks that share one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from step import Step, command, main, told

from ddpkit.course.lab import Lab, lab
from ddpkit.course.trial import Trials

ROOT = Path(__file__).resolve().parents[2]
CORE_PATH = ("02", "03", "05", "06", "07")
ABREAST = 4
IN_DRY_RUN = 1


def gpu_tests(step: Step) -> None:
    words = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-rs", str(ROOT / "tests" / "test_gpu.py")]
    code, text = command(step, sys.executable, *words, env={"COLUMNS": "160"}, limit_s=85)
    step.text("pytest.txt", text)
    step.see(f"exit code {code}; {told(text, ' failed', ' error', ' passed', ' skipped')}", exitcode=code)


def core_labs(step: Step) -> None:
    """Each lab as it is, and with its plain remedy: how it ends."""
    chosen = list(labs_of_the_core_path())
    if step.dry:
        chosen = chosen[:IN_DRY_RUN]
    with ThreadPoolExecutor(ABREAST) as pool:
        rows = list(pool.map(lambda each: ends(step, each), chosen))
    head = "| lab | as it is | page | cured |\n|:--|:--|:--|:--|"
    step.text("table.md", "\n".join([head, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n")
    cured = sum(row[3] == "cures" for row in rows)
    step.see(f"{cured} of {len(rows)} labs are cured; of them as it is: {', '.join(sorted({row[1] for row in rows}))}")


def labs_of_the_core_path() -> Iterator[Lab]:
    """Those whose programs the notebooks show; a budget of memory counts another memory on a GPU (step 3)."""
    for number in CORE_PATH:
        for path in (ROOT / "notebooks").glob(f"{number}_*.ipynb"):
            for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
                name = cell["metadata"].get("lab")
                if name and "memory_budget" not in lab(name).program:
                    yield lab(name)


def ends(step: Step, found: Lab) -> tuple[str, str, str, str]:
    options = step.sharing(env={"TORCH_DIST_TIMEOUT": str(step.timeout_s)})
    del options["show"], options["env"]
    trials = Trials(found, found.program, options)
    env = {"TORCH_DIST_TIMEOUT": str(step.timeout_s)}
    broken = trials.run(env=env)
    cured = trials.run([found.remedy(found.plain)], env=env)
    page = broken.diagnosis.name if broken.diagnosis else "none"
    return found.name, trials.outcome(broken).ends, page, trials.outcome(cured).ends


if __name__ == "__main__":
    main(globals())
