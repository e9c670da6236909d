"""Compares what a student read from the evidence with what a task wants: a rank, a layer, a line, a remedy, a word."""

from __future__ import annotations

import re
from typing import Any

from .exercises import seed
from .lab import Remedy, lab

ENDS = {"fails": "the job fails", "hangs": "the job hangs", "wrong": "it passes, and is wrong", "slow": "it stays slow"}


def mismatch(given: Any, wanted: dict[str, Any], program: str, nproc: int) -> str:
    """What to say of an answer that is not as wanted; "" where it is.

    `wanted` has one of `rank` ("by seed" is the seed modulo the ranks), `layer`, `line`, `is` (one of these values), and
    `remedy` (what the remedy must be, by its lab's own words).
    """
    parts = given if type(given) in (list, tuple) else [given]
    if not all(type(part) in (str, int) for part in parts):
        return f"a {type(given).__name__}, which is no text, number or list of them"
    text = " ".join(map(str, parts))
    if "remedy" in wanted:
        return _no_such_remedy(text, wanted["lab"], wanted["remedy"])
    if "layer" in wanted:
        right = _is_layer(text, wanted["layer"])
    elif "line" in wanted:
        right = _is_line(text, wanted["line"], program)
    else:
        right = _word(text) in map(_word, wanted["is"] if "is" in wanted else _ways_to_say(wanted["rank"], nproc))
    return "" if right else repr(given)


def _word(value: Any) -> str:
    """A value as it is compared: `all_reduce #11`, `allreduce` and `All_Reduce` are the same."""
    return re.sub(r"#\d+|[^a-z0-9-]", "", str(value).lower())


def _ways_to_say(rank: Any, nproc: int) -> tuple[str, ...]:
    if rank == "every rank":
        return ("every rank", "all ranks", "both ranks", "every", "all", "both", " ".join(map(str, range(nproc))))
    number = seed() % nproc if rank == "by seed" else rank
    return (str(number), f"rank {number}")


def _is_layer(given: str, wanted: str) -> bool:
    """Whether only this layer is named, by itself or by its parameters, as torch's own message does."""
    whole = re.compile(rf"((self|ddp|net|module)\.)*{wanted}(\.(weight|bias))?")
    return all(whole.fullmatch(name) for name in re.split(r"[,\s]+", given))


def _is_line(given: str, wanted: str, program: str) -> bool:
    """Whether `given` is the number of that line, or words that are in no other, with or without `line 34: ` before them."""
    lines, text = ["".join(line.split()) for line in program.splitlines()], "".join(given.split())
    words, number = re.sub(r"^(line)?\d+:?", "", text), int(re.sub(r"\D", "", text) or 0)
    meant = [line for line in lines if words in line] if words else lines[number - 1 : number]
    return meant == ["".join(wanted.split())]


def _no_such_remedy(given: str, lab_name: str, wanted: dict[str, Any]) -> str:
    offered = lab(lab_name).remedies
    named = next((one for one in offered if _word(given) in (_word(one.name), _word(one.title))), None)
    if named is None:
        return f"{given!r}; the remedies are {', '.join(one.name for one in offered)}"
    right = all(getattr(named, key) in (value if isinstance(value, list) else [value]) for key, value in wanted.items())
    return "" if right else f"{named.name!r}: {_does(named)}. {named.why}"


def _does(remedy: Remedy) -> str:
    """What a remedy does, in a few words, by its lab's account, which the tests prove with a run of every remedy."""
    cures = "it cures" if remedy.kind == "cure" else "it cures at a price"
    return ENDS.get(remedy.ends) or (cures if remedy.keeps else f"{cures}, and trains something else")
