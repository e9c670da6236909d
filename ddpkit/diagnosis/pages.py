"""Reads `catalog/<failure>/page.md`: the name of each failure, how to recognise it, and the page that explains it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import groupby

PAGE, LAB = "page.md", "lab.toml"
FENCE = "+++"
PLACES = ("failure", "stderr", "torchrun", "log", "native")

# Every value of `Verdict.kind`. A signature may be one of them.
KINDS = frozenset(
    "passed own too_early told_by_others tie left_early never_joined unmatched no_key straggler mismatch not_finite "
    "shapes_differ stopped_process spawned loader_stuck loader_dead init_waiting init_elsewhere stale_addresses all_waiting "
    "busy silent sent_a_signal thread_died agent_killed node_lost agent_failed peer_lost gave_up ended timed_out unknown".split()
)


class NoSuchPage(LookupError):
    """The catalog has no failure of that name; the message suggests the nearest names."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Signature:
    """One way to recognise a failure: a `text`, the `signal` that killed a rank, or the kind of the `verdict`.

    `text` is a regular expression; it must match in an exception of this `type` ("" is any). `where` says where to look:
    "failure" (type, message and chain of the exception), "stderr", "torchrun" (the agent's log), "native" (the C++ functions
    in which the rank sleeps with the GIL), or "" for the first two. `ddpkit diagnose` reads plain logs: it looks for all
    texts but "failure" and "native", and also for "log", what a scheduler or the kernel wrote. A group named `rank` is the
    rank at fault. `consequence`: this text is never the cause. `general`: it says where something failed, not why, and any
    other text wins over it. `beside`: healthy logs may hold it too; it counts only beside a failure. `shared`: logs of other
    failures, or of none, hold it too, so that it is never certain.
    """

    text: str = ""
    type: str = ""
    where: str = ""
    signal: str = ""
    verdict: str = ""
    consequence: bool = False
    general: bool = False
    beside: bool = False
    shared: bool = False

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """`text`, compiled; `^` and `$` match at every line."""
        return re.compile(self.text, re.MULTILINE)

    @property
    def names_rank(self) -> bool:
        """Whether a group of `text` names the rank at fault."""
        return "(?P<rank>" in self.text

    @property
    def spans_lines(self) -> bool:
        """Whether a match may be longer than a line."""
        return "\\n" in self.text or r"[^\0]" in self.text

    @property
    def in_logs(self) -> bool:
        """Whether `ddpkit diagnose` looks for this text."""
        return bool(self.text) and self.where not in ("failure", "native")

    def looks_at(self, place: str) -> bool:
        """Whether to look for this text at `place`, one of `PLACES`."""
        return place == self.where if self.where else place in ("failure", "stderr")


@dataclass(frozen=True, repr=False)
class Page:
    """One failure: `text` is its page in Markdown, `seen_with` the versions that produced it ("documentation": never run here).

    `family` groups it with its like in the list; `labs` are the programs that show it, `notebook` the notebook that teaches
    it; () and "" where there is none.
    """

    name: str
    title: str
    family: str
    seen_with: str
    signatures: tuple[Signature, ...]
    text: str
    notebook: str = ""
    labs: tuple[str, ...] = ()

    @property
    def links(self) -> str:
        """Its labs and its notebook, in words; "" where there are none."""
        labs = ", ".join(f'`FixBench("{name}")`' for name in self.labs)
        in_labs = f"Break it and mend it: {labs}." if labs else ""
        in_notebook = f"Notebook: `notebooks/{self.notebook}.ipynb`." if self.notebook else ""
        return f"{in_labs} {in_notebook}".strip()

    def _repr_markdown_(self) -> str:
        return self._below(f"# {self.title}\n\n`{self.name}`")

    def __repr__(self) -> str:
        return self._below(f"{self.title}\n{self.name}")

    def _below(self, heading: str) -> str:
        return f"{heading} · seen with: {self.seen_with}\n\n{self.text}\n{self.links}".rstrip() + "\n"


@dataclass(frozen=True, repr=False)
class Contents:
    """Name and title of every page by family, as `explain()` shows them."""

    pages: tuple[Page, ...]

    def __repr__(self) -> str:
        width = max(len(p.name) for p in self.pages)
        lines = []
        for family, some in self._families():
            lines += ["", family, *(f"  {p.name:<{width}}  {p.title}" for p in some)]
        return "\n".join(lines[1:])

    def _repr_markdown_(self) -> str:
        rows = ["| failure | |", "|:--|:--|"]
        for family, some in self._families():
            rows += [f"| *{family}* | |", *(f"| `{p.name}` | {p.title} |" for p in some)]
        return "\n".join(rows)

    def _families(self) -> Iterator[tuple[str, Iterator[Page]]]:
        return groupby(sorted(self.pages, key=lambda p: (p.family, p.name)), key=lambda p: p.family)


def explain(name: str | None = None) -> Page | Contents:
    """The page of failure `name`, as Markdown in a notebook and as text elsewhere; without `name`, a list of all.

    Raises:
        NoSuchPage: no failure has that name.
    """
    return Contents(pages()) if name is None else page(name)


def page(name: str) -> Page:
    """The page of failure `name`, or of the failure that the lab `name` shows; `unused-parameters` works as well.

    Raises:
        NoSuchPage: no failure has that name; the message suggests the nearest.
    """
    wanted = re.sub(r"[\s-]+", "_", name.strip().lower())
    known = {p.name: p for p in pages()}
    for each in known.values():
        if wanted == each.name or (wanted in each.labs and wanted not in known):
            return each
    near = get_close_matches(wanted, known, n=3, cutoff=0.55) or [n for n in known if wanted and wanted in n][:3]
    meant = f"Did you mean {' or '.join(near)}? " if near else ""
    raise NoSuchPage(f"explain: the catalog has no failure {name!r}. {meant}`ddpkit explain` lists all {len(known)}.")


@cache
def pages() -> tuple[Page, ...]:
    """Every page, by name."""
    return read_pages(files("ddpkit").joinpath("catalog"))


def all_signatures() -> Iterator[tuple[Page, Signature]]:
    """Every signature of every page, with its page."""
    for each in pages():
        for signature in each.signatures:
            yield each, signature


def read_pages(folder: Traversable) -> tuple[Page, ...]:
    """The pages in `folder`, which has one folder for each failure: TOML between two lines `+++`, then Markdown."""
    folders = sorted(folder.iterdir(), key=lambda f: f.name)
    labs: dict[str, list[str]] = {}
    for each in folders:
        if each.joinpath(LAB).is_file():
            told = tomllib.loads(each.joinpath(LAB).read_text(encoding="utf-8"))
            labs.setdefault(told.get("page", each.name), []).append(each.name)
    found = []
    for each in folders:
        if each.joinpath(PAGE).is_file():
            source = each.joinpath(PAGE).read_text(encoding="utf-8")
            _, head, text = source.split(f"{FENCE}\n", 2)
            told = tomllib.loads(head)
            about = told["title"], told["family"], told["seen_with"]
            signatures = tuple(Signature(**table) for table in told.get("signatures", ()))
            runnable = tuple(labs.get(each.name, ()))
            found.append(Page(each.name, *about, signatures, text.strip() + "\n", told.get("notebook", ""), runnable))
    return tuple(found)
