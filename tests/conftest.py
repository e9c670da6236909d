"""What every test of real jobs stands on: a run folder of its own, and proof that no process of its jobs is left."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import ddpkit
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


def left_after(home: Path, seconds: float) -> list[str]:
    """Processes of any job below `home` still alive `seconds` from now; none of them a moment earlier is enough."""
    until = time.monotonic() + seconds
    while (left := living(home)) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def process_of(run: ddpkit.Run, words: str, without: str = "\0") -> psutil.Process:
    """The process of `run` whose command line holds `words`, and not `without`.

    Raises:
        LookupError: there is none.
    """
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            if words in line and without not in line and process.environ().get(wire.ENV_RUN) == str(run.folder):
                return process
        except psutil.Error:
            continue
    raise LookupError(f"no process with {words}")


@pytest.fixture(scope="session")
def _zygote(tmp_path_factory: pytest.TempPathFactory) -> None:
    """This process's zygote, ready, so that a launch that does not wait is a warm one too."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "hello.py").write_text("print('hello')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(wire.ENV_HOME, str(folder))
        assert ddpkit.launch(folder / "hello.py", show=False, timeout=120).warm


@pytest.fixture(params=["cold", "warm"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test twice: with every launch cold, and with every launch warm."""
    if request.param == "warm":
        request.getfixturevalue("_zygote")
    monkeypatch.setenv(wire.ENV_WARM, "1" if request.param == "warm" else "0")
    return str(request.param)


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
