"""Reads a configuration from mappings and YAML files, and collects everything that is wrong with them.

`keys.py` lists the keys, `words.py` reads them from a command line, `check.py` judges what was read.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
YES, NO, NOTHING = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null", "")


@dataclass(frozen=True)
class Key:
    """One key of a configuration: its type, its default, what it means, and the values it may have.

    `kind` is int, float, bool or str; an `optional` key may be None. `least` is allowed, `above` and `below` are not.
    `same`: a resumed job must have the same value.
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
        """`training.batch_size`, as messages name it."""
        return f"{self.section}.{self.name}"

    @property
    def option(self) -> str:
        """`--batch-size`."""
        return "--" + self.name.replace("_", "-")

    def read(self, value: Any) -> Any:
        """`value` in this key's type, or unchanged where it does not fit. YAML 1.1 reads 1e-4 as text, so text is parsed."""
        text = value.strip().lower() if isinstance(value, str) else None
        if self.optional and (value is None or text in NOTHING):
            return None
        if self.kind == "str":
            return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        if self.kind == "bool":
            return {**dict.fromkeys(YES, True), **dict.fromkeys(NO, False)}.get(text or "", value)
        return _number(value, whole=self.kind == "int")

    def fault(self, value: Any) -> str:
        """Why `value` is not allowed, in one sentence; "" where it is."""
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
    """A value as messages quote it: `true`, `'many'`, `3`."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    return repr(value)


def near(name: str, names: Sequence[str]) -> str:
    """The end of a sentence that suggests the nearest of `names`; "" where none is near."""
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def _is(value: Any, kind: str) -> bool:
    if kind in ("int", "float"):
        right = isinstance(value, int) if kind == "int" else isinstance(value, int | float) and math.isfinite(value)
        return right and not isinstance(value, bool)
    return isinstance(value, bool if kind == "bool" else str)


def _number(value: Any, whole: bool) -> Any:
    """The number that `value` is or spells out (1e3 is a whole number too); anything else stays as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return value
    if not whole:
        return number
    return int(number) if number.is_integer() else value


class Reading:
    """What was read so far: `values` by key, `faults` as sentences, `unread` the keys whose value does not fit.

    Later values replace earlier ones, so read the file first and then the command line.
    """

    def __init__(self, keys: Mapping[str, Key]) -> None:
        self.keys = keys
        self.sections = tuple(dict.fromkeys(key.section for key in keys.values()))
        self.values: dict[str, Any] = {}
        self.faults: list[str] = []
        self.unread: set[str] = set()

    def file(self, path: Path) -> None:
        """Read a YAML file."""
        try:
            self.mapping(_yaml(path))
        except ValueError as error:
            self.faults.append(str(error))

    def take(self, key: Key, value: Any) -> None:
        """Store `value` for `key`, or what is wrong with it."""
        found = key.read(value)
        if fault := key.fault(found):
            self.faults.append(fault)
            self.unread.add(key.name)
        else:
            self.values[key.name] = found

    def mapping(self, given: Mapping[Any, Any], section: str = "") -> None:
        """Read keys with values, in sections or without; or those of one `section`."""
        for name, value in given.items():
            said = f"{section}.{name}" if section else str(name)
            if isinstance(value, Mapping):
                self._section(str(name), value, said)
            elif value is None and not section and name in self.sections:
                continue  # a section with nothing in it
            elif (key := self.keys.get(name)) is None:
                self.faults.append(f"there is no key {said}{near(str(name), tuple(self.keys))}")
            elif section and section != key.section:
                self.faults.append(f"{said} belongs in the section {key.section}")
            else:
                self.take(key, value)

    def _section(self, name: str, value: Mapping[Any, Any], said: str) -> None:
        if name in self.sections:
            self.mapping(value, name)
        elif name in self.keys:
            self.faults.append(f"{self.keys[name].path} takes {KINDS[self.keys[name].kind]}, and a section is given")
        else:
            self.faults.append(f"there is no section {said}{near(name, self.sections)}")


def _yaml(path: Path) -> Mapping[Any, Any]:
    """What the file holds.

    Raises:
        ValueError: it does not exist, cannot be read, or holds no keys; the message is the whole sentence.
    """
    import yaml

    if not path.is_file():
        others = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        found = f"{path} is a folder" if path.is_dir() else f"there is no file {path} in {Path.cwd()}"
        raise ValueError(f"{found}{near(path.name, others) or '; give the path of a YAML file'}")
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} is not YAML: {_words(error)}") from None
    if given is None:
        raise ValueError(f"{path.name} holds nothing; write keys such as batch_size: 32, or leave the file out")
    if not isinstance(given, Mapping):
        raise ValueError(f"{path.name} holds a {type(given).__name__}; write keys such as batch_size: 32")
    return given


def _words(error: Exception) -> str:
    """What the YAML reader complains about, on one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else " ".join(str(error).split())
