"""`TrainConfig`: every key of a training with its default and its meaning; what a trainer is built from, and validated before.

It is read by `read.py` (YAML) and `words.py` (command lines), and judged by `check.py`. No torch here:
the same check runs in the notebook, before a job starts, and in the ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import check
from .keys import Values, all_keys
from .read import Reading
from .words import explained, read_words, written


class ConfigError(ValueError):
    """A configuration that cannot be trained with: `faults` has a sentence for each thing that is wrong with it."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(["Configuration errors:", *(f"- {fault}" for fault in self.faults)]))

    def _render_traceback_(self) -> list[str]:
        """In a notebook the sentences are all."""
        return [str(self)]


@dataclass(frozen=True)
class TrainConfig(Values):
    """What is trained, how, and what is watched and saved on the way.

    Times are in seconds, memory as the key's unit says; None switches off what a key limits. Making one checks nothing:
    `errors` does, and the three `from_...` do, which raise `ConfigError` with everything that is wrong.
    """

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], world_size: int = 1, device_type: str = "") -> TrainConfig:
        """From keys with values, in their sections or without; for a job as in `errors`.

        Raises:
            ConfigError: with everything that is wrong: unknown keys, wrong sections, types and values.
        """
        reading = Reading(all_keys())
        reading.mapping(given)
        return _made(reading, world_size, device_type)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], world_size: int = 1, device_type: str = "") -> TrainConfig:
        """From a YAML file with sections (`model:`, `training:`, `data:`, ...) or without.

        Raises:
            ConfigError: as `from_dict`; or the file is not there, is empty or is no YAML.
        """
        reading = Reading(all_keys())
        reading.file(Path(path).expanduser())
        return _made(reading, world_size, device_type)

    @classmethod
    def from_args(
        cls,
        argv: Sequence[str] | None = None,
        base: TrainConfig | None = None,
        world_size: int = 1,
        device_type: str = "",
        others: Sequence[str] = (),
    ) -> TrainConfig:
        """From the words of a command line (by default this program's own): `base`, then `--config FILE`, then the options.

        `-h` or `--help` prints every key and ends the program. `others`: options of the caller's own, which a message may
        suggest.

        Raises:
            ConfigError: as `from_dict`, and for options that are unknown or lack their value.
        """
        words = sys.argv[1:] if argv is None else argv
        if {"-h", "--help"} & set(words):
            print(explained(all_keys()))
            raise SystemExit(0)
        reading = Reading(all_keys())
        reading.values.update(base.to_dict() if base else {})
        read_words(reading, words, others)
        return _made(reading, world_size, device_type)

    def to_args(self) -> list[str]:
        """The words that `from_args` makes this configuration from: only what differs from the defaults."""
        return written(all_keys(), self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value, without sections; `from_dict` takes it back."""
        return dataclasses.asdict(self)

    def errors(self, world_size: int = 1, device_type: str = "") -> list[str]:
        """All that is wrong, a sentence each, for a job of `world_size` ranks.

        `device_type`: "cpu" or "cuda", the device of the ranks; "" leaves out what depends on it.
        """
        return check.faults(self, world_size, device_type)

    def remarks(self, world_size: int = 1, device_type: str = "") -> list[str]:
        """What will not do what it seems to promise, a sentence each; none of it keeps a training from running."""
        return check.remarks(self, world_size, device_type)

    def identity(self) -> dict[str, Any]:
        """The values that must be equal for a resumed training to be the same: model, data, optimisation; no intervals,
        folders, limits, or the end of it."""
        return {name: float(v) if all_keys()[name].kind == "float" and v is not None else v for name, v in self._same()}

    def fingerprint(self) -> str:
        """A hash of `identity`, equal in every process and on every machine."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:16]

    def changes_training(self, written: Mapping[str, Any]) -> str:
        """What of `identity` is not as in `written`, the `to_dict` of another training, in words; "" where nothing is."""
        other = {name: written[name] for name, _ in self._same() if name in written}
        mine = self.identity()
        return ", ".join(
            f"{all_keys()[n].path} is {there} there and {mine[n]} here"
            for n, there in other.items()
            if there != mine[n]
        )

    def _same(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name, key in all_keys().items() if key.same]


def validate_config(
    config: TrainConfig | Mapping[str, Any], world_size: int = 1, device_type: str = "cpu"
) -> tuple[bool, list[str]]:
    """Whether `config` can be trained with by `world_size` ranks on `device_type`, and all that is wrong, a sentence each.

    A mapping is read as `from_dict` does.
    """
    if isinstance(config, TrainConfig):
        found = config.errors(world_size, device_type)
        return not found, found
    reading = Reading(all_keys())
    reading.mapping(config)
    found = _all_faults(reading, world_size, device_type)
    return not found, found


def _made(reading: Reading, world_size: int, device_type: str) -> TrainConfig:
    if found := _all_faults(reading, world_size, device_type):
        raise ConfigError(found)
    return TrainConfig(**reading.values)


def _all_faults(reading: Reading, world_size: int, device_type: str) -> list[str]:
    """What could not be read, and what is wrong with the rest of it."""
    rest = TrainConfig(**reading.values)
    return [*reading.faults, *check.faults(rest, world_size, device_type, leave_out=reading.unread)]
