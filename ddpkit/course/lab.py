"""Reads `catalog/<failure>/broken.py` and `lab.toml`: a failure that can be run, what it shows, and its remedies as edits."""

from __future__ import annotations

import difflib
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from ddpkit.diagnosis.pages import LAB, BadPage, NoSuchPage
from ddpkit.errors import LaunchError
from ddpkit.run import Run

CATALOG = Path(__file__).parents[1] / "catalog"
PROGRAM, RECORDED, RECORDED_ON_GPU = "broken.py", "recorded.zip", "gpu.zip"
EXPECTED = ("fails", "hangs", "silent")
KINDS = ("cure", "costly", "decoy")
# How a decoy ends: as a failed job, as one that hangs, or as one that passes and is wrong.
ENDS = ("fails", "hangs", "wrong")


class NoSuchLab(NoSuchPage):
    """No failure of that name can be run: what was asked, the nearest names."""


class BadLab(BadPage):
    """A lab cannot be read: which file, which key, what is wrong with it."""


@dataclass(frozen=True)
class Remedy:
    """What somebody recommends against a failure, as edits of the script: each an `(old, new)` pair of texts.

    `kind`: a "cure" cures, a "costly" one cures at a price that `why` names, a "decoy" does not, and then `ends` says how
    the job ends. `keeps`: whether the training stays the same, so that one process can be compared with. `source`: where
    it is recommended, by the ids of docs/coverage.md.
    """

    name: str
    title: str
    kind: str
    why: str
    edits: tuple[tuple[str, str], ...] = ()
    env: Mapping[str, str] | None = None
    ends: str = ""
    keeps: bool = True
    source: str = ""


@dataclass(frozen=True)
class Lab:
    """A failure that can be run. `program` is the script; `expect` how it ends: "fails", "hangs", or "silent", which is to
    pass and be wrong; `culprit` and `page` are what the run must say, and `plain` names the remedy that is the same
    training without the fault. `reference` holds the edits that make the plain script a training in one process."""

    name: str
    title: str
    program: str
    expect: str
    remedies: tuple[Remedy, ...]
    plain: str
    culprit: Any = None
    page: str = ""
    nproc: int = 2
    stall: float = 3.0
    timeout: float = 60.0
    env: Mapping[str, str] | None = None
    platforms: tuple[str, ...] = ("linux", "darwin")
    reference: tuple[tuple[str, str], ...] = ()

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

    @property
    def recorded(self) -> Path:
        """The bundle of a run of the program as it is, for where it cannot be had."""
        return CATALOG / self.name / RECORDED


def patched(script: str, edits: Iterable[tuple[str, str]]) -> str:
    """`script` with each `(old, new)` put in; every old text must be there once.

    Raises:
        LaunchError: an old text is not there, or more than once; it is quoted.
    """
    for old, new in edits:
        if (count := script.count(old)) != 1:
            there = "is not in the script" if not count else f"is in the script {count} times"
            raise LaunchError(f"an edit does not fit: {there}: {old.strip().splitlines()[0].strip()}")
        script = script.replace(old, new)
    return script


def fits(script: str, remedy: Remedy) -> bool:
    """Whether every edit of `remedy` finds its place in `script`."""
    try:
        patched(script, remedy.edits)
    except LaunchError:
        return False
    return True


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


@cache
def labs() -> tuple[Lab, ...]:
    """Every failure of the catalog that can be run, by name.

    Raises:
        BadLab: one of them cannot be read.
    """
    found = []
    for file in sorted(CATALOG.glob(f"*/{LAB}")):
        program = read_program(file.with_name(PROGRAM))
        found.append(parse(file.parent.name, file.read_text(encoding="utf-8"), program))
    return tuple(found)


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


def parse(name: str, source: str, program: str) -> Lab:
    """The lab of failure `name` from the texts of its two files.

    Raises:
        BadLab: a key is missing, is not known, or is not as it must be; an edit does not fit the program.
    """
    try:
        return _lab(name, tomllib.loads(source), program)
    except tomllib.TOMLDecodeError as error:
        raise BadLab(f"catalog/{name}/{LAB}: it is no TOML: {error}.") from None
    except ValueError as error:
        raise BadLab(f"catalog/{name}/{LAB}: {error}") from None


def _lab(name: str, found: dict[str, Any], program: str) -> Lab:
    _check("the lab", found, Lab, {"name", "program"})
    _check_choice("expect", found["expect"], EXPECTED)
    if isinstance(found.get("culprit"), list):
        found["culprit"] = tuple(found["culprit"])
    found["remedies"] = tuple(_remedy(program, table) for table in found["remedies"])
    found["reference"] = _edits("the reference", found.get("reference", []))
    found["platforms"] = tuple(found.get("platforms", Lab.platforms))
    made = Lab(name=name, program=program, **found)
    if made.plain not in [r.name for r in made.remedies]:
        raise ValueError(f"key `plain` is {made.plain!r}, which is none of its remedies.")
    _check_fit("the reference", patched(program, made.remedy(made.plain).edits), made.reference)
    return made


def _remedy(program: str, table: dict[str, Any]) -> Remedy:
    place = f"remedy {table.get('name', '?')!r}"
    _check(place, table, Remedy, set())
    _check_choice(f"kind of {place}", table["kind"], KINDS)
    if ("ends" in table) != (table["kind"] == "decoy"):
        raise ValueError(f"{place} must say how it `ends` if, and only if, it is a decoy.")
    if "ends" in table:
        _check_choice(f"ends of {place}", table["ends"], ENDS)
    remedy = Remedy(**{**table, "edits": _edits(place, table.get("edits", []))})
    _check_fit(place, program, remedy.edits)
    return remedy


def _edits(place: str, found: Any) -> tuple[tuple[str, str], ...]:
    if not all(isinstance(e, list) and len(e) == 2 and all(isinstance(t, str) for t in e) for e in found):
        raise ValueError(f"the edits of {place} must be pairs of texts, [old, new].")
    return tuple((old, new) for old, new in found)


def _check_fit(place: str, program: str, edits: Sequence[tuple[str, str]]) -> None:
    try:
        patched(program, edits)
    except LaunchError as error:
        raise ValueError(f"{place}: {error}") from None


def _check(place: str, found: Mapping[str, Any], kind: type, given: set[str]) -> None:
    known = {f.name: f for f in fields(kind) if f.name not in given}
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1) or known
            raise ValueError(f"key `{key}` of {place} is not known; use {', '.join(near)}.")
    for key, needed in known.items():
        if needed.default is MISSING and not found.get(key):
            raise ValueError(f"{place} has no `{key}`.")


def _check_choice(key: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"key `{key}` is {value!r}; use {', '.join(choices)}.")
