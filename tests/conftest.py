"""What tests of real jobs share: a folder of their own, waiting for a job, and proof that no process of it is left."""

from __future__ import annotations

import os
import socket
import textwrap
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
import recording
from jobs import FOLDER

import ddpkit
from ddpkit.runfolder import wire

TORCH = tuple(map(int, metadata.version("torch").split(".")[:2]))
# An older torch records no collectives of gloo: then stacks alone tell, without numbers.
RECORDS = TORCH >= (2, 13)
needs_record = pytest.mark.skipif(not RECORDS, reason="this torch records no collectives of gloo")
# A build with CUDA brings NCCL, of no use where there is no GPU.
HAS_NCCL = any(found.name.startswith("nvidia-nccl") for found in metadata.distributions())
has_fully_shard = pytest.mark.skipif(TORCH < (2, 6), reason="this torch has no fully_shard")

# Rank 0 hangs in a collective that rank 1 never joins.
BLOCKED = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
print("ready", flush=True)
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(3))
time.sleep(1000)
"""

# Each rank makes some steps; one of them then fails.
STEPS = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(int(sys.argv[1])):
    dist.all_reduce(torch.ones(1))
    print("step", step, flush=True)
    time.sleep(0.1)
if dist.get_rank() == int(sys.argv[2]):
    raise ValueError("no more data")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def wait_for(said: Callable[[], Any], seconds: float = 5.0) -> Any:
    """What `said` returns, as soon as that is true; fails when it has not become so within `seconds`."""
    until = time.monotonic() + seconds
    while not (found := said()) and time.monotonic() < until:
        time.sleep(0.005)
    assert found
    return found


def wait_for_line(run: ddpkit.Run, text: str) -> None:
    """Return when both ranks of `run` have printed `text`; fails when the job ends before."""
    until = time.monotonic() + 120
    while not (len(run.ranks) == 2 and all(text in r.stdout for r in run.ranks)):
        assert run.state == "running" and time.monotonic() < until, str(run)
        time.sleep(0.02)


def wait_until_blocked(home: Path) -> None:
    """Return when both ranks of the one job below `home` have said "ready", whichever process launched it."""
    logs = "runs/*/logs/*/attempt_0/*/stdout.log"
    wait_for(lambda: sum("ready" in log.read_text() for log in (home / ".ddpkit").glob(logs)) == 2, 120)


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the cold starts, which take twenty times as long, to `make soak`, but for tests of how processes start and end."""
    for item in items:
        way = item.callspec.params.get("way") if hasattr(item, "callspec") else None
        if way == "cold" and not item.get_closest_marker("cold"):
            item.add_marker(pytest.mark.soak)


@pytest.fixture
def warm_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The zygote of these tests, asked a moment ago: it is not importing, so that a launch that does not wait is warm too."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "hello.py").write_text("print('hello')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(wire.ENV_HOME, str(folder))
        assert ddpkit.launch(folder / "hello.py", nproc=1, show=False, timeout=120).warm


@pytest.fixture(params=["cold", "warm"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test twice: with every launch warm, and with every launch cold; that in `make soak` where it is not marked so."""
    if request.param == "warm":
        request.getfixturevalue("warm_process")
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


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folders of all jobs."""
    folder = tmp_path_factory.mktemp("recorded")
    for archive in FOLDER.glob(f"*{recording.SUFFIX}"):
        recording.unpack(archive, folder / archive.name.removesuffix(recording.SUFFIX))
    return folder


@pytest.fixture
def as_root() -> bool:
    """Whether the tests run as root."""
    return os.geteuid() == 0
