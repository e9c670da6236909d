"""The failing jobs of tests/recorded/verdicts/jobs.toml: each a program, how it is launched, and what is true of it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import ddpkit
from ddpkit.course.lab import labs

FOLDER = Path(__file__).parent / "recorded" / "verdicts"

IMPORTS = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
rank = int(os.environ["RANK"])
"""
# What comes above a job's own lines, by its `start`; an impatient job gives up every wait after 2 s.
STARTS = {
    "usual": f"""{IMPORTS}
dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(4))
""",
    "impatient": f"""{IMPORTS}
dist.init_process_group("gloo", timeout=timedelta(seconds=2))
for _ in range(3):
    dist.all_reduce(torch.ones(4))
""",
    "none": IMPORTS,
    "bare": "",
}


@dataclass(frozen=True, eq=False)
class Job:
    """One job and its truth.

    `culprit` is what `run.culprit` gives, "nobody" for None. `untold` says why the verdict may only be "cannot be told";
    "" where it must name the culprit; `instead` is whom it then names in error. `live`: `make test` launches it too,
    instead of only judging its recording; `needs_record`: an older torch, which records no collectives of gloo, cannot tell it.
    """

    name: str
    family: str
    script: str
    culprit: Any
    page: str
    state: str
    nproc: int = 2
    start: str = "usual"
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] | None = None
    untold: str = ""
    instead: str | None = None
    live: bool = False
    needs_record: bool = False

    @property
    def text(self) -> str:
        """The whole program."""
        return (STARTS[self.start] + self.script).lstrip("\n")

    @property
    def told(self) -> tuple[Any, str]:
        """The culprit and the page that the verdict has to give."""
        if self.untold or self.culprit == "nobody":
            return self.instead, self.page
        return (tuple(self.culprit) if isinstance(self.culprit, list) else self.culprit), self.page

    @property
    def folder_name(self) -> str:
        """The folder of its recording, in that of its family."""
        return re.sub(r"\W+", "_", self.name)

    @property
    def family_folder(self) -> str:
        """The folder and the archive of its family's recordings."""
        return self.family.replace(" ", "_")


@cache
def jobs() -> tuple[Job, ...]:
    """Every job of jobs.toml, and the broken program of every lab."""
    listed = tomllib.loads((FOLDER / "jobs.toml").read_text(encoding="utf-8"))["job"]
    return (*(Job(**job) for job in listed), *_of_the_labs())


def _of_the_labs() -> list[Job]:
    found = []
    for lab in labs():
        state = {"fails": "failed", "hangs": "hung", "silent": "passed", "slow": "passed"}[lab.expect]
        found.append(
            Job(
                name=f"lab {lab.name}",
                family="labs",
                script=lab.program,
                culprit="nobody" if lab.culprit is None else lab.culprit,
                page="" if lab.expect in ("silent", "slow") else lab.page or lab.name,
                state=state,
                nproc=lab.nproc,
                start="bare",
                options={"nnodes": lab.nnodes, "stall": lab.stall, "timeout": lab.timeout, "stop_on_stall": True},
                env=dict(lab.env or {}),
            )
        )
    return found


def launched(job: Job, folder: Path) -> ddpkit.Run:
    """The job's run, from a script in `folder`."""
    path = folder / "train.py"
    path.write_text(job.text, encoding="utf-8")
    hangs = {"stall": 2, "stop_on_stall": True} if job.state == "hung" else {}
    options = {"timeout": 120, **hangs, **job.options}
    env = {**(job.env or {}), **options.pop("env", {})}
    return ddpkit.launch(path, nproc=job.nproc, env=env, show=False, **options)


def untrue(job: Job, run: ddpkit.Run) -> str:
    """What is said of `run` that is not true of `job`; "" where all is."""
    said = (run.state, run.culprit, run.diagnosis.name if run.diagnosis else "")
    expected = (job.state, *job.told)
    return "" if said == expected else f"{said} instead of {expected}: {run}"
