"""`launch(nnodes=2)`: two agents on this machine are one run, whose ranks are told with their hosts; none is left."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import STEPS, wait_for

import ddpkit
from ddpkit.launcher import options
from ddpkit.machine import devices
from ddpkit.runfolder import wire

pytestmark = pytest.mark.job


@pytest.fixture
def launched(script: Callable[..., str]) -> Callable[..., ddpkit.Run]:
    def launch(steps: int = 3, bad: int = -1, **options: Any) -> ddpkit.Run:
        given = {"nnodes": 2, "nproc": 1, "show": False, "timeout": 120, **options}
        return ddpkit.launch(script(STEPS), args=[steps, bad], **given)

    return launch


def processes_of(run: ddpkit.Run, node: str) -> list[psutil.Process]:
    """What runs for one agent of the job."""
    marks = {f"{wire.ENV_RUN}={run.folder}", f"{wire.ENV_NODE}={node}"}
    found = []
    for process in psutil.process_iter():
        try:
            if marks <= {f"{name}={value}" for name, value in process.environ().items()}:
                found.append(process)
        except psutil.Error:
            continue
    return found


def hosts_the_store(run: ddpkit.Run, node: str, port: int) -> bool:
    """Whether this agent listens at the endpoint of the rendezvous; torchrun settles which one does."""
    name = "net_connections" if hasattr(psutil.Process, "net_connections") else "connections"  # before psutil 6
    for process in processes_of(run, node):
        for used in getattr(process, name)():
            if used.status == psutil.CONN_LISTEN and used.laddr.port == port:
                return True
    return False


def test_two_agents_are_one_run(launched: Callable[..., ddpkit.Run]) -> None:
    run = launched(nproc=2)
    assert run.ok and run.world_size == 4 and run.nproc == 2, run
    assert sorted(rank.node for rank in run.ranks) == ["node0", "node0", "node1", "node1"]
    assert all(rank.stdout.count("step") == 3 for rank in run.ranks)
    assert run.facts == "4 ranks · 2 agents · gloo on CPU"
    assert str(ddpkit.Run.from_folder(run.folder)) == str(run)


def test_who_failed_is_told_with_its_host(launched: Callable[..., ddpkit.Run]) -> None:
    run = launched(bad=1)
    assert (run.state, run.culprit) == ("failed", 1), run
    assert f"rank 1 on {run.ranks[1].node}: ValueError" in run.headline
    assert [rank.role for rank in run.ranks] == ["consequence", "culprit"]


def test_stop_ends_both_agents(launched: Callable[..., ddpkit.Run]) -> None:
    run = launched(steps=10_000, wait=False)
    wait_for(lambda: len(run.ranks) == 2 and all("step 0" in rank.stdout for rank in run.ranks), 60)
    run.stop()
    assert run.state == "stopped" and run.verdict.sentence == "The job was stopped.", run
    assert not processes_of(run, "node0") and not processes_of(run, "node1")


def test_the_end_of_one_agent_leaves_the_ranks_of_the_other_alone(launched: Callable[..., ddpkit.Run]) -> None:
    run = launched(
        steps=10_000,
        wait=False,
        nnodes="1:2",
        max_restarts=1,
        env={"PET_RDZV_CONF": "keep_alive_interval=1,last_call_timeout=1"},
    )
    wait_for(lambda: len(run.ranks) == 2 and all("step 0" in rank.stdout for rank in run.ranks), 60)
    port = int(re.search(r"localhost:(\d+)", run.command)[1])  # type: ignore[index]
    other = next(node for node in ("node0", "node1") if not hosts_the_store(run, node, port))
    for process in processes_of(run, other):
        os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: run.ranks[0].attempt == 1 and "step 0" in run.ranks[0].stdout, 120)
    assert len(run.ranks) == 1 and run.ranks[0].world_size == 1
    run.stop()
    assert not processes_of(run, "node0") and not processes_of(run, "node1")


def test_an_agent_does_not_wait_for_one_that_has_failed(script: Callable[..., str], tmp_path: Path) -> None:
    """One agent fails before its rank joins; torchrun's own exit barrier lets the other wait for 300 s."""
    fails_alone = script("import os\nif os.environ['DDPKIT_NODE'] == 'node1':\n    raise SystemExit(3)\n")
    run = ddpkit.launch(fails_alone, nnodes=2, nproc=1, show=False, timeout=120)
    assert run.state == "failed" and sorted(rank.exitcode for rank in run.ranks) == [0, 3], run


REFUSED = [
    ({"nnodes": 0}, "nnodes=0 is not a number of agents"),
    ({"nnodes": "2:1"}, "is not a number of agents"),
    ({"nnodes": True}, "is not a number of agents"),
    ({"torchrun": ["--standalone"]}, "leave --standalone out"),
    ({"torchrun": ["--nnodes=3"]}, "leave --nnodes out"),
    (
        {"torchrun": ["--rdzv-endpoint=nobody.invalid:29400"]},
        "the host nobody.invalid of --rdzv-endpoint cannot be resolved",
    ),
    ({"nproc": 9}, "9 ranks for each of 2 agents asked for"),
]


@pytest.mark.parametrize(("asked", "said"), REFUSED)
def test_what_is_refused(launched: Callable[..., ddpkit.Run], asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ddpkit.LaunchError, match=said):
        launched(**asked)


def test_each_agent_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [devices.Gpu(index, f"GPU-{index}", "H") for index in range(4)]
    monkeypatch.setattr(devices, "all_gpus", lambda: gpus)
    monkeypatch.setattr(options, "torch_has_cuda", lambda: True)
    asked = options.checked_options(nproc=2, nnodes=2)
    own = {"node0": {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1"}, "node1": {"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-3"}}
    assert options.gpus_of_each_agent(asked, {}) == own
    assert options.gpus_of_each_agent(asked, {"CUDA_VISIBLE_DEVICES": "0,1"}) == {"node0": {}, "node1": {}}
