"""The memory monitor: what it warns of and how often, what a snapshot holds, and that it never gets in an error's way."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ddpkit
from ddpkit import Run
from ddpkit.rank import MemoryMonitor
from ddpkit.rank.memory import host
from ddpkit.runfolder import wire

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="on the CPU a budget needs Linux")
Script = Callable[..., str]


def launch(path: str, **options: Any) -> Run:
    return ddpkit.launch(path, show=False, **{"timeout": 120, "backend": "gloo", **options})


TRAINING = """
import logging
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from ddpkit.rank import MemoryMonitor, memory_budget, setup

logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
with setup() as here:
    budget = memory_budget(120)
    net = DDP(nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))))
    optimizer = torch.optim.Adam(net.parameters())
    kept = []
    # 4 MiB each of parameters and buckets, 8 of state, 4 of gradients while there are any.
    with MemoryMonitor() as monitor:
        for step in range(80):
            net(torch.ones(4, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
            if here.rank == 1:
                kept.append(torch.ones(2, 2**18))
"""


@pytest.mark.job
@on_linux
def test_a_rank_is_warned_once_at_each_threshold_and_one_that_runs_out_leaves_a_snapshot(script: Script) -> None:
    run = launch(script(TRAINING))
    assert run.culprit == 1 and run.diagnosis and run.diagnosis.name == "out_of_memory_cpu", str(run)
    zero, one = run.ranks
    mark = re.findall(r"^ddpkit\.rank WARNING memory: (.*)$", one.stderr, re.M)[0]
    assert re.fullmatch(
        r"\d+ of 120 MiB in use at step \d+, 8\d %, over the mark of 80 %; the limit is the memory budget", mark
    )
    assert one.stderr.count("over the mark of 80 %") == 1 and "over the mark" not in zero.stderr
    (path,) = one.folder.glob("memory_rank_1_step_*.json")
    assert f"a snapshot was written to {path}" in one.stderr
    assert not list(zero.folder.glob("memory_rank_*"))
    check_snapshot(json.loads(path.read_text()))
    stats = run.reported[1]["memory"]
    assert stats["limit_mib"] == 120 and stats["limit"] == "the memory budget" and stats["device"] is None
    assert 95 < stats["used_mib"] < 121 < stats["rss_mib"] <= stats["peak_rss_mib"]
    assert stats["steps"] == int(path.stem.rpartition("_")[2]) > 4


def check_snapshot(found: dict[str, Any]) -> None:
    """It holds the known parts, and the largest tensors, each piece of memory once."""
    parts = {part: round(size) for part, size in found["parts_mib"].items()}
    # Some gradients are there or none, as it ran out in a forward or a backward.
    assert parts.pop("gradients") <= 4
    assert parts == {"parameters": 4, "optimizer state": 8, "DDP buckets": 4}
    assert len(found["largest"]) == 20 and {each["mib"] for each in found["largest"]} == {2}
    assert found["largest"][0] == {"mib": 2, "shape": [2, 2**18], "dtype": "float32", "parameter": False}
    assert not any(each["parameter"] for each in found["largest"])
    assert 80 < found["tensors_mib"] < 121 and found["stats"]["limit_mib"] == 120


ALONE = """
import logging, os, pathlib, sys, time
import torch
from torch import nn
from ddpkit.rank import MemoryMonitor

logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
net = nn.Linear(512, 512, bias=False)
optimizer = torch.optim.Adam(net.parameters())
net(torch.ones(4, 512)).sum().backward()
optimizer.step()

with MemoryMonitor(limit_mib=1, every=3) as quiet:
    print("at once", quiet.stats()["limit_mib"])
with MemoryMonitor(every=3) as monitor:
    before = monitor.stats()
    for step in range(7):
        large = torch.ones(40, 2**18) if step == 2 else None
        monitor.step()
    path = monitor.snapshot()
    after = monitor.stats()
    view = net.weight.detach()[:3]
print("grew", 39 < after["peak_rss_mib"] - before["rss_mib"] < 60, after["rss_mib"] - before["rss_mib"] < 30, after["steps"])
print("limit", after["limit"], after["limit_mib"] > 100)
print("path", path.read_text())

here = os.getcwd()
os.mkdir("gone")
os.chdir("gone")
os.rmdir(f"{here}/gone")
try:
    with MemoryMonitor():
        raise MemoryError("the one that counts")
except MemoryError as error:
    print("raised", error)
os.chdir(here)
try:
    with MemoryMonitor():
        raise ValueError("out of memory")
except ValueError:
    print("files", sorted(p.name for p in pathlib.Path().glob("memory_*")))
began = time.perf_counter()
with MemoryMonitor() as monitor:
    for _ in range(2000):
        monitor.step()
print("us", (time.perf_counter() - began) / 2000 * 1e6)
"""


@pytest.mark.job
def test_it_works_in_one_process_without_a_job(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, cwd=tmp_path)
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert "raised" in said, done.stderr
    # Both thresholds were passed at once, and the higher says it all.
    assert done.stderr.count("over the mark of 95 %; the limit is limit_mib") == 1 and "80 %" not in done.stderr
    assert said["grew"] == "True True 7"
    assert said["limit"] in ("the machine's memory True", "the cgroup's limit True")
    found = json.loads(said["path"])
    assert found["parts_mib"] == dict(zip(wire.MEMORY_PARTS, (1, 1, 2, 0), strict=True))
    assert found["largest"][0]["shape"] == [512, 512] and found["tensors_mib"] < 10
    assert [each["parameter"] for each in found["largest"]].count(True) == 1
    assert said["raised"] == "the one that counts"
    assert "memory: the snapshot could not be written: FileNotFoundError" in done.stderr
    assert said["files"] == "['memory_rank_0_step_7.json']"
    # A hundredth of a step of 10 ms, on a machine that is busy too.
    assert float(said["us"]) < 100


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"limit_mib": 0}, "MemoryMonitor: limit_mib=0 asked for; give MiB above 0, or None."),
        ({"every": 0}, "MemoryMonitor: every=0 asked for; give a number of steps, 1 or more."),
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MemoryMonitor(**asked)


def test_the_narrowest_cgroup_counts_in_both_versions(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (tmp_path / "outer" / "memory.max").write_text(f"{512 << 20}\n")
    assert list(host._of_cgroup(tmp_path, "/outer/inner")) == [(512.0, "the cgroup's limit")]
    (tmp_path / "memory.limit_in_bytes").write_text(f"{256 << 20}\n")
    assert min(host._of_cgroup(tmp_path, "/outer/inner"))[0] == 256
    # In a container the path is that of the host.
    assert list(host._of_cgroup(tmp_path, "/not/here")) == [(256.0, "the cgroup's limit")]


def test_ranks_on_one_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_mib, whose = host.share_of_host()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    share_mib, said = host.share_of_host()
    assert share_mib == whole_mib / 4 and said == f"a share of {whose}, of {whole_mib:.0f} MiB for 4 ranks"


@pytest.mark.job
def test_on_a_gpu_it_reads_the_allocator_and_leaves_cudas_own_snapshot(script: Script) -> None:
    path = script(
        """
        import torch
        from ddpkit.rank import MemoryMonitor, memory_budget, report, setup

        with setup() as here:
            memory_budget(256)
            held = torch.ones(200, 2**18, device=here.device)
            try:
                with MemoryMonitor() as monitor:
                    monitor.step()
                    torch.ones(100, 2**18, device=here.device)
            except torch.OutOfMemoryError:
                report(stats=monitor.stats())
        """
    )
    code = "import torch; print(torch.cuda.device_count())"
    if subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "0\n":
        pytest.skip("there is no GPU here")
    run = launch(path, nproc=1, backend="nccl")
    assert run.ok, str(run)
    stats = run.reported[0]["stats"]
    assert 200 <= stats["device"]["allocated_mib"] <= stats["device"]["peak_reserved_mib"] <= 256
    assert stats["limit"] == "the memory budget" and stats["used_mib"] == stats["device"]["reserved_mib"]
    (snapshot,) = run.ranks[0].folder.glob("memory_rank_0_step_1.pickle")
    assert snapshot.stat().st_size > 1000
