"""Reads a configuration from mappings and YAML files, and gathers everything in them that cannot be read.

`training.py` holds the keys, `words.py` reads them from a command line, `check.py` judges what was read.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Other names for a key, as they are met in guides and scripts.
ALIASES = {
    "use_mixed_precision": "use_amp",
    "accumulation_steps": "gradient_accumulation_steps",
    "epochs": "num_epochs",
    "workers": "num_workers",
    "lr": "learning_rate",
}
# Sections of other layouts: what their entries are called here.
OTHER_SECTIONS = {
    "scheduler": {"type": "scheduler", "warmup_steps": "warmup_steps"},
    "fsdp": {"use_mixed_precision": "use_amp"},
}
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
YES, NO, NOTHING = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null", "")


@dataclass(frozen=True)
class Key:
    """One key of a configuration: its type, its default, what it says, and the values it may have.

    `kind` is int, float, bool or str; `optional` ones may be None. `least` is allowed, `above` and `below` are not.
    `same`: a training that is resumed must have the same value.
    """

    name: str
    section: str
    kind: str
    optional: bool
    default: Any
    says: str
    unit: str = ""
    same: bool = False
    least: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Section and name, as messages give them."""
        return f"{self.section}.{self.name}"

    @property
    def option(self) -> str:
        """How it is written on a command line."""
        return "--" + self.name.replace("_", "-")

    def read(self, value: Any) -> Any:
        """`value` in this key's type; a text may hold it, as YAML 1.1 takes 1e-4 for one. What it cannot be, it stays."""
        text = value.strip().lower() if isinstance(value, str) else None
        if self.optional and (value is None or text in NOTHING):
            return None
        if self.kind == "str":
            return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        if self.kind == "bool":
            return {**dict.fromkeys(YES, True), **dict.fromkeys(NO, False)}.get(text or "", value)
        return _number(value, whole=self.kind == "int")

    def fault(self, value: Any) -> str:
        """The sentence that says why `value` cannot be, "" where it can."""
        if value is None and self.optional:
            return ""
        if self.choices and value not in self.choices:
            hint = near(str(value), self.choices)
            return f"{self.path} must be one of {', '.join(self.choices)} ({shown(value)} given){hint}"
        if not _is(value, self.kind):
            return f"{self.path} must be {KINDS[self.kind]}{' or none' * self.optional} ({shown(value)} given)"
        if self.kind == "str" and not value.strip():
            return f"{self.path} must not be empty"
        if isinstance(value, str):
            return ""
        limits = [f"at least {self.least:g}"] if self.least is not None and value < self.least else []
        limits += [f"above {self.above:g}"] if self.above is not None and value <= self.above else []
        limits += [f"below {self.below:g}"] if self.below is not None and value >= self.below else []
        return f"{self.path} must be {' and '.join(limits)} ({shown(value)} given)" if limits else ""


def shown(value: Any) -> str:
    """A value as messages quote it, in YAML's words."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    return repr(value)


def near(name: str, names: Sequence[str]) -> str:
    """The end of a sentence that suggests what may have been meant."""
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def _is(value: Any, kind: str) -> bool:
    if kind in ("int", "float"):
        right = isinstance(value, int) if kind == "int" else isinstance(value, int | float) and math.isfinite(value)
        return right and not isinstance(value, bool)
    return isinstance(value, bool if kind == "bool" else str)


def _number(value: Any, whole: bool) -> Any:
    """`value` as the number that it is or that a text holds; 1e3 is a whole number too. Anything else stays as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    if whole and not isinstance(value, float):
        with contextlib.suppress(ValueError):
            return int(value)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return value
    if not whole:
        return number
    return int(number) if number.is_integer() else value


class Reading:
    """What was read so far: `values` by key, `faults` as sentences, `unread` keys that were given and could not be read.

    What is read later replaces what was read before: a file first, then the command line.
    """

    def __init__(self, keys: Mapping[str, Key]) -> None:
        self.keys = keys
        self.sections = tuple(dict.fromkeys(key.section for key in keys.values()))
        self.values: dict[str, Any] = {}
        self.faults: list[str] = []
        self.unread: set[str] = set()
        self._said: dict[str, str] = {}

    def mapping(self, given: Any) -> None:
        """Take keys with values, in sections or without."""
        self._said = {}
        if not isinstance(given, Mapping):
            self.faults.append(f"a configuration is keys with values, and this is a {type(given).__name__}")
        else:
            self._entries(given, "")

    def file(self, path: Path) -> None:
        """Take a YAML file."""
        try:
            given, twice = _yaml(path)
        except ValueError as error:
            self.faults.append(str(error))
            return
        self.faults += [f"{path.name}: {name} stands there twice; keep one" for name in twice]
        self.mapping(given)

    def take(self, name: str, value: Any, said: str = "") -> None:
        """Take `value` for the key `name`, which was written as `said`."""
        key = self.keys[name]
        found = key.read(value)
        if fault := key.fault(found):
            self.faults.append(fault)
            self.unread.add(name)
            return
        self.values[name] = found
        if said and (before := self._said.setdefault(name, said)) != said:
            self.faults.append(f"{name} is given twice, as {before} and as {said}; keep one")

    def _entries(self, given: Mapping[Any, Any], section: str) -> None:
        for name, value in given.items():
            said = f"{section}.{name}" if section else str(name)
            if isinstance(value, Mapping):
                self._section(str(name), value, said)
            elif value is None and not section and name in self.sections:
                continue  # a section with nothing in it
            elif (key := self.keys.get(_known_as(section, name))) is None:
                self._unknown(said, str(name), section)
            elif section in self.sections and section != key.section:
                self.faults.append(f"{said} belongs in the section {key.section}")
            else:
                self.take(key.name, value, said)

    def _section(self, name: str, value: Mapping[Any, Any], said: str) -> None:
        known = (*self.sections, *OTHER_SECTIONS)
        if name in known:
            self._entries(value, name)
        elif name in self.keys:
            self.faults.append(f"{self.keys[name].path} takes {KINDS[self.keys[name].kind]}, and a section is given")
        else:
            self.faults.append(f"there is no section {said}{near(name, known)}")

    def _unknown(self, said: str, name: str, section: str) -> None:
        if section in OTHER_SECTIONS:
            self.faults.append(f"there is no key {said}; that section takes {' and '.join(OTHER_SECTIONS[section])}")
        else:
            self.faults.append(f"there is no key {said}{near(name, (*self.keys, *ALIASES))}")


def _known_as(section: str, name: Any) -> Any:
    if section in OTHER_SECTIONS:
        return OTHER_SECTIONS[section].get(name)
    return ALIASES.get(name, name)


def _yaml(path: Path) -> tuple[Mapping[Any, Any], list[str]]:
    """What the file holds, and the keys that stand twice in one of its mappings, of which YAML keeps the last.

    Raises:
        ValueError: it is not there, cannot be read, or holds no keys; the message is the whole sentence.
    """
    import yaml

    if not path.is_file():
        others = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        found = f"{path} is a folder" if path.is_dir() else f"there is no file {path} in {Path.cwd()}"
        raise ValueError(f"{found}{near(path.name, others) or '; give the path of a YAML file'}")
    try:
        text = path.read_text(encoding="utf-8")
        tree, given = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} is not YAML: {_words(error)}") from None
    if given is None:
        raise ValueError(f"{path.name} holds nothing; write keys such as batch_size: 32, or leave the file out")
    if not isinstance(given, Mapping):
        raise ValueError(f"{path.name} holds a {type(given).__name__}; write keys such as batch_size: 32")
    return given, list(_twice(tree))


def _words(error: Exception) -> str:
    """What YAML's reader says, on one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else " ".join(str(error).split())


def _twice(node: Any) -> Iterator[str]:
    import yaml

    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        yield from dict.fromkeys(name for name in names if names.count(name) > 1)
        for _, value in node.value:
            yield from _twice(value)
