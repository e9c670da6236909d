"""Exercises: reads `tasks/<task>/`, keeps what a student has done, and gives `hint`, `progress` and `reset`.

Task "02.1" is the folder t02_1: `task.toml`, its program, and what `grading.py` compares an answer with.
"""

from __future__ import annotations

import base64
import os
import random
import time
import tomllib
import zlib
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from ddpkit.display.html import table_row
from ddpkit.errors import LaunchError
from ddpkit.launcher.launcher import start
from ddpkit.launcher.options import checked_options
from ddpkit.launcher.target import of_text
from ddpkit.run import Run
from ddpkit.runfolder import wire
from ddpkit.runfolder.folders import home

from .lab import read_program

LEVELS = 3
# Begins a file that `make student` has packed.
SEAL = b"="
BAR = 24


class NoSuchTask(LookupError):
    """There is no exercise of that name: what was asked, which there are."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Task:
    """One exercise. `answer` is "run", "function" or "evidence"; `hints` are its three levels; `wants` what evidence must say;
    the programs are texts, "" where there is none.

    `program` is what is handed out or runs as a mystery, `reference` trains the same in one process, `harness` calls a
    function that is the answer. `keep` are texts that the answer must leave in the program; `reduced_once`: DDP reduces
    each gradient once a step. `stall` and `timeout` are seconds; `restarts` is how often torchrun starts the ranks anew.
    """

    name: str
    title: str
    difficulty: str
    minutes: int
    answer: str
    hints: tuple[str, str, str]
    after: str
    program: str = ""
    reference: str = ""
    harness: str = ""
    wants: dict[str, Any] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    reduced_once: bool = False
    nproc: int = 2
    stall: float = 3.0
    timeout: float = 60.0
    restarts: int = 0

    @property
    def effort(self) -> str:
        """How hard it is, and how long it takes: `easy, 10 minutes`."""
        return f"{self.difficulty}, {self.minutes} minutes"

    @property
    def limits(self) -> dict[str, Any]:
        """The options of `launch` that bound a job of this task."""
        return {"stall": self.stall, "timeout": self.timeout, "max_restarts": self.restarts}

    def run(self, **options: Any) -> Run:
        """Launch the task's program with your own seed, its verdict held back; `options` as for `launch`."""
        if not self.program:
            raise LaunchError(f"task {self.name}: it has no program to run; its notebook says what to write.")
        name = f"task_{self.name.replace('.', '_')}"
        show = options.pop("show", None)
        env = {wire.ENV_SEED: str(seed()), **options.pop("env", {})}
        asked = {**self.limits, "nproc": self.nproc, "stop_on_stall": True, "reveal": False, "name": name, **options}
        return start(of_text(self.program, name), checked_options(env=env, **asked), show=show)


def task(name: str) -> Task:
    """The exercise called `name`, such as "02.1".

    Raises:
        NoSuchTask: there is none of that name.
    """
    known = {one.name: one for one in tasks()}
    if name in known:
        return known[name]
    near = get_close_matches(str(name), known, n=2, cutoff=0.5)
    meant = f"Did you mean {' or '.join(near)}? " if near else ""
    raise NoSuchTask(f"there is no exercise {name!r}. {meant}The exercises: {', '.join(known)}.")


@cache
def tasks() -> tuple[Task, ...]:
    """Every exercise, in order."""
    folders = (Path(__file__).parents[1] / "tasks").glob("t*_*")
    return tuple(sorted(map(_read, folders), key=lambda one: one.name))


def hint(name: str, level: int | None = None) -> Hint:
    """The next hint of exercise `name`, or the one of `level` 1 to 3: where to look, with what, at which line."""
    asked, state = task(name), State.read()
    mine = state.of(name)
    if level is not None and level not in range(1, LEVELS + 1):
        raise LaunchError(f"hint: level={level!r} is not one of 1 to {LEVELS}.")
    reached = level or min(LEVELS, mine["hints"] + 1)
    again = level is None and mine["hints"] == LEVELS
    mine["hints"] = max(mine["hints"], reached)
    state.write()
    return Hint(name, reached, asked.hints[reached - 1], again)


@dataclass(frozen=True, repr=False)
class Hint:
    """One hint, shown as text, or folded in a notebook; `again`: the last one, asked for once more."""

    name: str
    level: int
    text: str
    again: bool = False

    @property
    def _title(self) -> str:
        there_are = f" (there are {LEVELS} hints; this is the last one again)" if self.again else ""
        return f"hint {self.level} of {LEVELS} for {self.name}{there_are}"

    def __repr__(self) -> str:
        more = f'\nddpkit.hint("{self.name}") says more.' if self.level < LEVELS else ""
        return f"{self._title}: {self.text}{more}"

    def _repr_html_(self) -> str:
        return f"<details open><summary>{escape(self._title)}</summary>{escape(self.text)}</details>"


def progress() -> Progress:
    """How far you are: every exercise with its tries, and a bar. It survives a restart."""
    state = State.read()
    return Progress(tuple((one, state.of(one.name)) for one in tasks()))


@dataclass(frozen=True, repr=False)
class Progress:
    """The exercises, each with what was done of it."""

    rows: tuple[tuple[Task, dict[str, Any]], ...]

    @property
    def solved(self) -> int:
        """Exercises that have passed."""
        return sum(bool(mine["passed"]) for _, mine in self.rows)

    def __repr__(self) -> str:
        total = len(self.rows)
        filled = round(BAR * self.solved / total)
        lines = [f"{'█' * filled}{'░' * (BAR - filled)} {self.solved} of {total} exercises"]
        lines += [f"{one.name}  {_done(mine):<18}  {one.effort:<18}  {one.title}" for one, mine in self.rows]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        total = len(self.rows)
        count = f"{self.solved} of {total} exercises"
        bar = f'<progress max="{total}" value="{self.solved}" aria-label="{count}"></progress>'
        rows = "".join(table_row((one.name, escape(one.title), one.effort, _done(mine))) for one, mine in self.rows)
        return f"<div>{bar} {count}</div><table>{rows}</table>"


def _done(mine: dict[str, Any]) -> str:
    tries = f"{mine['tries']} {'try' if mine['tries'] == 1 else 'tries'}"
    if mine["passed"]:
        return f"✓ solved, {tries}"
    return f"open, {tries}" if mine["tries"] else "open"


def reset(name: str | None = None) -> Progress:
    """Forget what was done of exercise `name`, or, without a name, of all of them."""
    state = State.read()
    if name is None:
        state.tasks.clear()
    else:
        state.tasks.pop(task(name).name, None)
    state.write()
    return progress()


def seed() -> int:
    """The student's own seed: which rank is at fault in a mystery depends on it, so that answers cannot be passed on."""
    fixed = os.environ.get(wire.ENV_SEED, "")
    return int(fixed) if fixed.isdigit() else State.read().seed


def workbook(here: Path) -> Path | None:
    """The workbook that holds this folder: the nearest one with notebooks/ and exercises/."""
    above = (here.resolve(), *here.resolve().parents)
    return next((one for one in above if (one / "exercises").is_dir() and (one / "notebooks").is_dir()), None)


def _kept() -> Path:
    """The folder of a student's seed and progress: .ddpkit of the workbook, or else that of the runs."""
    book = workbook(Path.cwd())
    return home() if book is None or os.environ.get(wire.ENV_HOME) else book / ".ddpkit"


@dataclass
class State:
    """What a student has done: a file, whole or not at all."""

    seed: int
    tasks: dict[str, dict[str, Any]]

    @classmethod
    def read(cls) -> State:
        """What is kept; a new one, with a seed of its own, where there is none yet."""
        found = wire.read_record(_kept() / wire.EXERCISES)
        state = cls(**found) if found else cls(random.SystemRandom().randrange(1, 10_000), {})
        if not found:
            state.write()
        return state

    def write(self) -> None:
        folder = _kept()
        folder.mkdir(parents=True, exist_ok=True)
        wire.write_record(folder / wire.EXERCISES, {"seed": self.seed, "tasks": self.tasks})

    def of(self, name: str) -> dict[str, Any]:
        """What was done of exercise `name`; a change to it is kept by `write`."""
        return self.tasks.setdefault(name, {"tries": 0, "hints": 0, "passed": None})

    def note(self, name: str, passed: bool) -> None:
        """Count a try of exercise `name`."""
        mine = self.of(name)
        mine["tries"] += 1
        mine["passed"] = mine["passed"] or (time.strftime("%Y-%m-%d %H:%M:%S") if passed else None)
        self.write()


def _read(folder: Path) -> Task:
    found = tomllib.loads(unsealed(folder / "task.toml"))
    kinds = [kind for kind in ("program", "reference", "harness") if (folder / f"{kind}.py").is_file()]
    texts: dict[str, Any] = {kind: read_program(folder / f"{kind}.py") for kind in kinds}
    found.update({key: tuple(found[key]) for key in ("hints", "keep") if key in found})
    return Task(folder.name[1:].replace("_", "."), **found, **texts)


def unsealed(path: Path) -> str:
    """The text of a file with answers; `make student` packs it, so that no answer is read by accident."""
    content = path.read_bytes()
    return (zlib.decompress(base64.b64decode(content[1:])) if content.startswith(SEAL) else content).decode()
