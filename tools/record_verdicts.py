"""Records the failing jobs that `make check` judges: launches each, and packs its run folder under tests/recorded/verdicts/.

`python tools/record_verdicts.py [WORD ...]` launches the jobs whose name or family holds one of the words, all without any.
A run that does not end as jobs.toml says is launched once more, and then told; its recording is kept as it was.
"""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import recording  # type: ignore[import-not-found]
from jobs import FOLDER, Job, jobs, launched  # type: ignore[import-not-found]

from ddpkit.runfolder import wire

ABREAST = 3


def main(words: list[str]) -> int:
    """Record the jobs that `words` name; the exit code is 1 where one did not end as it should."""
    with tempfile.TemporaryDirectory() as place:
        # Some of the jobs write into their working directory.
        os.chdir(place)
        os.environ[wire.ENV_HOME] = str(Path(place, "home"))
        os.environ[wire.ENV_KEEP_RUNS] = "2000"
        folders = Path(place, "folders")
        for archive in FOLDER.glob(f"*{recording.SUFFIX}"):
            recording.unpack(archive, folders / archive.name.removesuffix(recording.SUFFIX))
        asked = [job for job in jobs() if not words or any(word in f"{job.name} {job.family}" for word in words)]
        with ThreadPoolExecutor(ABREAST) as pool:
            wrong = [said for said in pool.map(lambda job: record(job, Path(place), folders), asked) if said]
        for family in sorted({job.family_folder for job in asked}):
            recording.pack(folders / family, FOLDER / f"{family}{recording.SUFFIX}")
    print(*wrong, sep="\n")
    return 1 if wrong else 0


def record(job: Job, place: Path, folders: Path) -> str:
    """Launch one job and keep its run folder; what is wrong with its end, "" where nothing is."""
    for attempt in range(2):
        script_folder = place / "scripts" / f"{job.folder_name}_{attempt}"
        script_folder.mkdir(parents=True)
        run = launched(job, script_folder)
        if run.state == job.state:
            recording.keep(run.folder, script_folder / "train.py", folders / job.family_folder / job.folder_name)
            print(f"{job.name}: {run.headline}", flush=True)
            return ""
    return f"{job.name}: {run.state} instead of {job.state}: {run}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
