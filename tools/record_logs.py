"""Records logs of failing jobs, started by plain torchrun, for the tests of `ddpkit diagnose`: labs and the matrix.

`python tools/record_logs.py FOLDER` runs each once and writes `<name>.log`, stdout and stderr together. A job that hangs is
ended by SIGTERM. What each log tells, and no more, is then entered in tests/recorded/logs.toml by hand.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from jobs import jobs  # type: ignore[import-not-found]

ABREAST = 3
LONGEST_S = 25
# Two of a kind are enough.
MOST_ALIKE = 2


def programs() -> Iterator[tuple[str, str, int]]:
    """Name, script and number of ranks of each job."""
    seen: dict[str, int] = {}
    for job in jobs():
        if job.family == "labs":
            kind = "silent" if job.state == "passed" else "lab"
            yield f"{kind}_{job.name.removeprefix('lab ')}", job.text, 2
            continue
        seen[job.page] = seen.get(job.page, 0) + 1
        if seen[job.page] <= MOST_ALIKE:
            yield job.folder_name, job.text, job.nproc


def record(folder: Path, name: str, script: str, ranks: int) -> None:
    """Run one job and keep what it wrote."""
    program = folder / "programs" / f"{name}.py"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(script)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--standalone", "--nproc-per-node", str(ranks), program.name]
    with open(folder / f"{name}.log", "wb") as log:
        job = subprocess.Popen(
            command, cwd=program.parent, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            job.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            job.send_signal(signal.SIGTERM)
            job.wait()
    print(name, job.returncode, flush=True)


def main() -> None:
    """Record every program."""
    folder = Path(sys.argv[1]).resolve()
    with ThreadPoolExecutor(ABREAST) as pool:
        list(pool.map(lambda each: record(folder, *each), programs()))


if __name__ == "__main__":
    main()
