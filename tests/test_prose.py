"""The worst habits of our English stay out of notebooks, pages, docs and messages."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Each was in a text that had to be read twice. The plain words are beside it.
HABITS = {
    r"(?<!the )\b(stands?|lies?) (in|on|at|beside|there)\b": "is in, is on",
    r"\btakes (Linux|a GPU|two ranks)\b": "needs",
    r"\ba training(?= (is|has|that|ends|of|which|with)\b|[.,;:])": "a job, a training run",
    r"(?<!half )(?<!twice )\bas many (micro-batches|batches|steps|calls|samples|ranks)\b(?! as)": "the same number of",
    r"(?<!there )\bis no (matter|question|news|wonder|remedy|help)\b": "is not",
    r"\bfor who\b(?!,)|\b[Ww]ho [\w ]{1,40}, that one\b": "for readers who",
    r"(^|[.!?] )(In|On|At) the (first|second|third|other|last) (every|each|all|no)\b": "subject first",
    r"\b(not|never) told (here|there)\b": "not covered here",
    r"\bNo \w+ helps\b": "it will not help",
    r"\bput away itself\b|\bbelongs once\b|\bwell one\b": "say it with a verb",
    r"\bLet's\b|\b[Ss]imply\b|\bIn this section we\b": "cut it",
    r"\b[Tt]here (it|they) (is|are)[.:]": "name it",
}


@cache
def texts() -> tuple[tuple[str, str], ...]:
    """What people read, as (file, text)."""
    found = []
    for path in sorted(ROOT.glob("[nse]*s/*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            found.append((path.name, "".join(cell["source"])))
    for pattern in ("README.md", "docs/*.md", *(f"ddpkit/**/*.{kind}" for kind in ("md", "toml", "py", "js"))):
        found += [(str(path.relative_to(ROOT)), path.read_text()) for path in sorted(ROOT.glob(pattern))]
    return tuple(found)


@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_is_not_back(habit: str) -> None:
    found = []
    for name, text in texts():
        for match in re.finditer(habit, text, re.MULTILINE):
            found.append(f"{name}: {text[max(0, match.start() - 40) : match.end() + 30]!r}")
    assert len(texts()) > 500
    assert not found, f"write {HABITS[habit]!r}: " + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    ["It lies on the bench.", "It takes Linux.", "What a training is made of", "every rank had as many micro-batches.",
     "04 and 13 are for who wants more.", "In the second every weight is gone", "No patience helps."],
)  # fmt: skip
def test_the_habits_are_recognised(text: str) -> None:
    assert any(re.search(habit, text, re.MULTILINE) for habit in HABITS)
