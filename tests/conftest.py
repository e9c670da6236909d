"""What every test of real jobs stands on: a run folder of its own, and proof that no process of its jobs is left."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ddpkit import wire


def living(home: Path) -> list[str]:
    """Command lines of the processes that carry a run folder below `home` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get(wire.ENV_RUN, "").startswith(str(home))
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
        except psutil.Error:
            continue
    return found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory with run folders below it; afterwards no process of its jobs may be left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(wire.ENV_HOME, str(tmp_path / ".ddpkit"))
    for name in ("RANK", wire.ENV_RUN):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    left = living(tmp_path)
    assert not left, f"processes left behind: {left}"


@pytest.fixture
def script(home: Path) -> Callable[[str], str]:
    """Writes `text` as a script into the working directory and returns its path."""

    def write(text: str, name: str = "train.py") -> str:
        path = home / name
        path.write_text(textwrap.dedent(text).lstrip("\n"))
        return str(path)

    return write


@pytest.fixture
def as_root() -> bool:
    """Whether the tests run as root."""
    return os.geteuid() == 0
