"""A configuration as command-line options: reads them, writes them, lists them all."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .read import NO, YES, Key, Reading, near

FILE = Key("config", "", "str", False, "", "a YAML file, read before the options")


def read_words(reading: Reading, argv: Sequence[str], others: Sequence[str] = ()) -> None:
    """Read `--key value`, `--key=value`, `--switch` and `--no-switch`. A file named by `--config` is read first.

    `others`: options that are read elsewhere; a message about a misspelt one may suggest them.
    """
    given = list(_options(reading, argv, others))
    for key, value in given:
        if key is FILE:
            reading.file(Path(value).expanduser())
    for key, value in given:
        if key is not FILE:
            reading.take(key, value)


def _options(reading: Reading, argv: Sequence[str], others: Sequence[str]) -> Iterator[tuple[Key, Any]]:
    known, rest = _spellings(reading.keys), deque(argv)
    while rest:
        word, equals, value = rest.popleft().partition("=")
        key, negated = known.get(word.replace("_", "-"), (None, False))
        if key is None:
            reading.faults.append(f"there is no option {word}{near(word, [*known, *others])}")
            while rest and not rest[0].startswith("-"):
                rest.popleft()
        elif negated:
            yield key, False
        elif equals:
            yield key, value
        elif key.kind == "bool":
            yield key, rest.popleft() if rest and rest[0].lower() in (*YES, *NO) else True
        elif rest and not rest[0].startswith("--"):
            yield key, rest.popleft()
        else:
            reading.faults.append(f"{word} needs a value after it")


def _spellings(keys: Mapping[str, Key]) -> dict[str, tuple[Key, bool]]:
    """Each option with its key, and whether the option switches it off."""
    found = {}
    for key in (*keys.values(), FILE):
        found[key.option] = key, False
        if key.kind == "bool":
            found[f"--no-{key.option[2:]}"] = key, True
    return found


def written(keys: Mapping[str, Key], values: Mapping[str, Any]) -> list[str]:
    """The options that give `values`: only what differs from the defaults."""
    words: list[str] = []
    for name, key in keys.items():
        value = values[name]
        if value == key.default:
            continue
        if isinstance(value, bool):
            words.append(key.option if value else f"--no-{key.option[2:]}")
            continue
        text = "none" if value is None else str(value)
        words += [f"{key.option}={text}"] if text.startswith("-") else [key.option, text]
    return words


def explained(keys: Mapping[str, Key]) -> str:
    """Every key with its default, by section."""
    lines = [
        "Every key is an option here and a key in a YAML file (--config FILE), there in its section or without one."
    ]
    for section in dict.fromkeys(key.section for key in keys.values()):
        lines += ["", section]
        lines += [_explained(key) for key in keys.values() if key.section == section]
    return "\n".join(lines)


def _explained(key: Key) -> str:
    if key.kind == "bool":
        return f"  {'--[no-]' + key.option[2:]:<31} {key.says} [{'on' if key.default else 'off'}]"
    default = "none" if key.default is None else f"{key.default} {key.unit}".rstrip()
    if others := [choice for choice in key.choices if choice != key.default]:
        default += f"; or {', '.join(others)}"
    return f"  {key.option:<31} {key.says} [{default}]"
