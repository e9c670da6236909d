"""Reads `catalog/<failure>/broken.py` and `lab.toml`: a failure that can be run, what it shows, and its remedies as edits."""

from __future__ import annotations

import difflib
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ddpkit.diagnosis.pages import LAB, NoSuchPage
from ddpkit.errors import LaunchError
from ddpkit.run import Run

from .call_edit import CallEdit, edited

CATALOG = Path(__file__).parents[1] / "catalog"
PROGRAM, RECORDED, RECORDED_ON_GPU = "broken.py", "recorded.zip", "gpu.zip"


Edit = Sequence[str] | CallEdit


class NoSuchLab(NoSuchPage):
    """No failure of that name can be run: what was asked, the nearest names."""


@dataclass(frozen=True)
class Remedy:
    """What somebody recommends against a failure, as edits of the script: each an `(old, new)` pair of texts, or of a call.

    `elsewhere`: the edits for a program of the reader's own, if `edits` fit the lab's program alone.
    `kind`: a "cure" cures, a "costly" one cures at a price that `why` names, a "decoy" does not, and then `ends` says how
    the job ends: "fails", "hangs", "wrong" or "slow". `keeps`: whether the training stays the same, so that one process
    can be compared with. `source`: where it is recommended, by the ids of docs/coverage.md.
    """

    name: str
    title: str
    kind: str
    why: str
    edits: Sequence[Edit] = ()
    elsewhere: Sequence[CallEdit] = ()
    env: Mapping[str, str] | None = None
    ends: str = ""
    keeps: bool = True
    source: str = ""

    def edits_for(self, script: str) -> Sequence[Edit]:
        """`edits`, or `elsewhere` where only those fit `script`."""
        return self.elsewhere if self.elsewhere and not fitting(script, self.edits) else self.edits

    @property
    def by_hand(self) -> str:
        """What to do by hand in a script that the remedy does not fit."""
        edit = (*self.elsewhere, *self.edits)[0]
        if isinstance(edit, CallEdit):
            return edit.by_hand
        old, new = (textwrap.shorten(text, 70, placeholder=" ...") for text in edit)
        return f"in the lab, {old} becomes {new}" if new else f"in the lab, {old} is taken out"


@dataclass(frozen=True)
class Lab:
    """A failure that can be run. `program` is the script; `expect` how it ends: "fails", "hangs", "silent", which is to
    pass and be wrong, or "slow"; `culprit` and `page` are what the run must say, and `plain` names the remedy that is the same
    training without the fault. `reference` holds the edits that make the plain script train in one process."""

    name: str
    title: str
    program: str
    expect: str
    remedies: tuple[Remedy, ...]
    plain: str
    culprit: Any = None
    page: str = ""
    nproc: int = 2
    nnodes: int | str = 1
    stall: float = 3.0
    timeout: float = 60.0
    env: Mapping[str, str] | None = None
    platforms: Sequence[str] = ("linux", "darwin")
    reference: Sequence[Sequence[str]] = ()

    def remedy(self, name: str) -> Remedy:
        """The remedy called `name`.

        Raises:
            LaunchError: this lab has none of that name; the nearest is in the sentence.
        """
        known = {r.name: r for r in self.remedies}
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}."
            raise LaunchError(f"{self.name}: there is no remedy {name!r}; {hint}")
        return known[name]

    def why_not_here(self) -> str:
        """Why this failure cannot be had on this platform; "" where it can."""
        if sys.platform in self.platforms:
            return ""
        return f"{self.name} can be run on {' and '.join(self.platforms)}; this is {sys.platform}."

    def written_as(self, script: str) -> bool:
        """Whether `script` is this lab's program, perhaps with edits: edits of calls fit other programs as well."""
        plain = self.remedy(self.plain)
        has_texts = any(not isinstance(edit, CallEdit) for edit in plain.edits)
        return all(fitting(script, r.edits) for r in ([plain] if has_texts else self.remedies))

    @property
    def recorded(self) -> Path:
        """The bundle of a run of the program as it is, for where it cannot be had."""
        return CATALOG / self.name / RECORDED


def patched(script: str, edits: Iterable[Edit]) -> str:
    """`script` with every edit put in: first each `(old, new)`, whose old text must be there once, then those of calls.

    Raises:
        LaunchError: an old text is not there, or more than once; it is quoted. Or there is no such call.
    """
    of_calls = []
    for edit in edits:
        if isinstance(edit, CallEdit):
            of_calls.append(edit)
            continue
        old, new = edit
        if (count := script.count(old)) != 1:
            there = "is not in the script" if not count else f"is in the script {count} times"
            raise LaunchError(f"an edit does not fit: {there}: {old.strip().splitlines()[0].strip()}")
        script = script.replace(old, new)
    for edit in of_calls:
        script = edited(script, edit)
    return script


def fitting(script: str, edits: Iterable[Edit]) -> bool:
    """Whether every one of `edits` finds its place in `script`."""
    try:
        patched(script, edits)
    except LaunchError:
        return False
    return True


def fits(script: str, remedy: Remedy) -> bool:
    """Whether `remedy` finds its place in `script`."""
    return fitting(script, remedy.edits_for(script))


def lab(name: str) -> Lab:
    """The lab of failure `name`.

    Raises:
        NoSuchLab: no failure of that name can be run; the nearest names are in the sentence.
    """
    known = {found.name: found for found in labs()}
    wanted = name.strip().lower().replace("-", "_")
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    meant = f"Did you mean {' or '.join(near)}? " if near else ""
    raise NoSuchLab(f"FixBench: there is no lab {name!r}. {meant}The labs: {', '.join(known)}.")


def lab_for(failure: str, title: str, run: Run) -> Lab:
    """The lab most like `run`, which ended with `failure`; one without remedies where the catalog has no lab of that failure.

    If `run` is of another program than the lab's, what fits it of the other labs of that failure is offered as well.
    """
    named = [one for one in labs() if failure in (one.name, one.page)]
    if not named:
        return Lab(failure, title, run.script, "fails", (), plain="")

    def likeness(one: Lab) -> tuple[bool, bool, int]:
        return one.written_as(run.script), one.culprit == run.culprit, sum(fits(run.script, r) for r in one.remedies)

    best, *others = sorted(named, key=likeness, reverse=True)
    if best.written_as(run.script):
        return best
    offered = list(best.remedies)
    for remedy in (r for one in others for r in one.remedies if fits(run.script, r)):
        if not any(remedy.name == r.name or remedy.title == r.title for r in offered):
            offered.append(remedy)
    return replace(best, title=title, remedies=tuple(offered))


@cache
def labs() -> tuple[Lab, ...]:
    """Every failure of the catalog that can be run, by name."""
    return tuple(map(_read, sorted(CATALOG.glob(f"*/{LAB}"))))


def on_gpu(name: str) -> Run | None:
    """The run of failure `name` that was recorded on a GPU; its first note says on which, with which versions, by which ranks.

    None, and a sentence, where none has been recorded yet.

    Raises:
        NoSuchPage: the catalog has no failure of that name.
    """
    known = [folder.name for folder in CATALOG.iterdir()]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
        meant = f" Did you mean {' or '.join(near)}?" if near else " `ddpkit explain` lists all."
        raise NoSuchPage(f"on_gpu: the catalog has no failure {name!r}.{meant}")
    bundle = CATALOG / name / RECORDED_ON_GPU
    if not bundle.exists():
        print(f"{name}: no run on a GPU has been recorded yet.")
        return None
    return Run.from_folder(bundle)


def read_program(file: Path) -> str:
    """A program as a reader sees it: without the sentence that opens its file, which may give the fault away."""
    source = file.read_text(encoding="utf-8")
    return source.split('"""', 2)[2].lstrip("\n") if source.startswith('"""') else source


def _read(file: Path) -> Lab:
    found = tomllib.loads(file.read_text(encoding="utf-8"))
    if isinstance(found.get("culprit"), list):
        found["culprit"] = tuple(found["culprit"])
    found["remedies"] = tuple(map(_remedy, found["remedies"]))
    return Lab(name=file.parent.name, program=read_program(file.with_name(PROGRAM)), **found)


def _remedy(table: dict[str, Any]) -> Remedy:
    for key in ("edits", "elsewhere"):
        table[key] = tuple(CallEdit(**edit) if isinstance(edit, dict) else edit for edit in table.get(key, ()))
    return Remedy(**table)
