"""`ddpkit doctor`: what this machine offers a job, what would break one, and what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from . import checks, topology, torch_checks
from .checks import Check

MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


@dataclass(frozen=True, repr=False)
class Report:
    """What the doctor found, as a table."""

    checks: tuple[Check, ...]

    @property
    def problems(self) -> tuple[Check, ...]:
        """The lines that would break a job."""
        return tuple(c for c in self.checks if c.level == "problem")

    def __repr__(self) -> str:
        width = max(len(c.name) for c in self.checks)
        rows = []
        for check in self.checks:
            rows.append(f"{MARKS[check.level]:<8}{check.name:<{width}}  {check.found}")
            if check.advice and check.level != "ok":
                rows.append(f"{'':<8}{'':<{width}}  -> {check.advice}")
        return "\n".join([*rows, self.summary])

    @property
    def summary(self) -> str:
        """`1 would break a job: /dev/shm.`, the last line of every form."""
        if not self.problems:
            return "Nothing here would break a job."
        return f"{len(self.problems)} would break a job: {', '.join(c.name for c in self.problems)}."

    def json(self) -> str:
        """The lines as JSON (name, found, level, advice), and how many are problems."""
        return json.dumps({"problems": len(self.problems), "checks": [asdict(c) for c in self.checks]}, indent=1)


def doctor(environment: Mapping[str, str] = os.environ) -> Report:
    """Look over this machine before a job: torch, GPUs, memory, limits, network, kernel log, stale variables.

    Takes some seconds, because torch is asked in a process of its own.
    """
    return Report(tuple(_every_check(environment)))


def _every_check(environment: Mapping[str, str]) -> Iterator[Check]:
    told = torch_checks.probe()
    yield checks.python()
    yield from torch_checks.torch_build(told)
    yield from torch_checks.gpus(told, environment)
    yield from topology.topology()
    yield checks.shared_memory()
    yield checks.open_files()
    yield checks.processes()
    yield checks.memory()
    yield checks.cores(len(told.get("gpus", {}).get("names", ())), environment)
    yield from checks.network(environment)
    yield checks.port()
    yield checks.kernel_log()
    yield from checks.variables(environment)
