"""`TrainConfig`: the settings of a training run, read from YAML or a command line and checked before a rank starts.

The same check runs in the notebook and in the ranks, so there is no torch here.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import check
from .keys import Values
from .read import Reading
from .words import explained, read_words, written


class ConfigError(ValueError):
    """A configuration that cannot be used: `faults` has a sentence for each thing that is wrong."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(["Configuration errors:", *(f"- {fault}" for fault in self.faults)]))

    def _render_traceback_(self) -> list[str]:
        """In a notebook, show the sentences without a traceback."""
        return [str(self)]


@dataclass(frozen=True)
class TrainConfig(Values):
    """What is trained, how, and what is watched and saved on the way.

    Times are in seconds, memory in the key's unit; None switches a limit off. Making one checks nothing: call `errors`. The
    three `from_...` check and raise `ConfigError` with everything that is wrong.
    """

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], world_size: int = 1, device_type: str = "") -> TrainConfig:
        """From keys with values, in their sections or without; for a job as in `errors`.

        Raises:
            ConfigError: unknown keys, wrong sections, types and values.
        """
        reading = Reading(cls.keys())
        reading.mapping(given)
        return _made(reading, world_size, device_type)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], world_size: int = 1, device_type: str = "") -> TrainConfig:
        """From a YAML file with sections (`model:`, `training:`, `data:`, ...) or without.

        Raises:
            ConfigError: as `from_dict`; or the file does not exist, is empty or is not YAML.
        """
        reading = Reading(cls.keys())
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
        """From a command line (by default this program's own): `base`, then `--config FILE`, then the options.

        `-h` or `--help` prints every key and ends the program. `others`: the caller's own options, which a message may
        suggest.

        Raises:
            ConfigError: as `from_dict`, and for options that are unknown or have no value.
        """
        words = sys.argv[1:] if argv is None else argv
        if {"-h", "--help"} & set(words):
            print(explained(cls.keys()))
            raise SystemExit(0)
        reading = Reading(cls.keys())
        reading.values.update(base.to_dict() if base else {})
        read_words(reading, words, others)
        return _made(reading, world_size, device_type)

    def to_args(self) -> list[str]:
        """The options from which `from_args` makes this configuration: only what differs from the defaults."""
        return written(self.keys(), self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value, without sections; `from_dict` takes it back."""
        return dataclasses.asdict(self)

    def errors(self, world_size: int = 1, device_type: str = "") -> list[str]:
        """What is wrong, a sentence each, for a job of `world_size` ranks.

        `device_type`: the device of the ranks, "cpu" or "cuda"; "" leaves out what depends on it.
        """
        return check.faults(self, world_size, device_type)

    def changes_training(self, written: Mapping[str, Any]) -> str:
        """What differs from `written`, the `to_dict` of the job to resume, and must not; "" where nothing does."""
        said = []
        for name, key in self.keys().items():
            here = getattr(self, name)
            if key.same and written.get(name, here) != here:
                said.append(f"{key.path} is {written[name]} there and {here} here")
        return ", ".join(said)


def validate_config(
    config: TrainConfig | Mapping[str, Any], world_size: int = 1, device_type: str = "cpu"
) -> tuple[bool, list[str]]:
    """Whether `world_size` ranks on `device_type` can train with `config`, and what is wrong, a sentence each.

    A mapping is read as by `from_dict`.
    """
    if isinstance(config, TrainConfig):
        found = config.errors(world_size, device_type)
        return not found, found
    reading = Reading(TrainConfig.keys())
    reading.mapping(config)
    found = _all_faults(reading, world_size, device_type)
    return not found, found


def _made(reading: Reading, world_size: int, device_type: str) -> TrainConfig:
    if found := _all_faults(reading, world_size, device_type):
        raise ConfigError(found)
    return TrainConfig(**reading.values)


def _all_faults(reading: Reading, world_size: int, device_type: str) -> list[str]:
    """What could not be read, and what is wrong with the rest."""
    rest = TrainConfig(**reading.values)
    return [*reading.faults, *check.faults(rest, world_size, device_type, leave_out=reading.unread)]
