"""`share_gpu`: more NCCL ranks than GPUs, with the driver's and torch's answers given; the jobs are real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_bad_input import refused

import ddpkit
from ddpkit.launcher import magic
from ddpkit.launcher.options import SHARED_GPU
from ddpkit.machine import devices
from ddpkit.rank.joining import backends, process_group
from ddpkit.rank.joining.environment import Place
from ddpkit.runfolder import wire

Script = Callable[..., str]

# What NCCL is told, as a rank sees it.
TOLD = """
import os
names = ("NCCL_NET", "NCCL_P2P_DISABLE", "NCCL_HOSTID", "DDPKIT_SHARE_GPU", "DDP_BACKEND")
# In one write: under plain torchrun both ranks share a pipe.
print(" ".join(f"{name}={os.environ.get(name)}" for name in names) + "\\n", end="")
"""
SHARED = "NCCL_NET=Socket NCCL_P2P_DISABLE=1 NCCL_HOSTID=None DDPKIT_SHARE_GPU=1 DDP_BACKEND=nccl\n"
NOTE = "2 ranks share 1 GPU by NCCL over sockets: its errors and timeouts are NCCL's own, its speed is not."


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has this machine seem to have so many GPUs, and a torch for them."""
    for name in ("CUDA_VISIBLE_DEVICES", wire.ENV_BACKEND, wire.ENV_SHARE_GPU, "NCCL_HOSTID", *SHARED_GPU):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ddpkit.launcher.options.torch_has_cuda", lambda: True)

    def there_are(count: int) -> None:
        monkeypatch.setattr(devices, "all_gpus", lambda: [devices.Gpu(i, f"GPU-{i}", "H") for i in range(count)])

    there_are(1)
    return there_are


Gpus = Callable[[int], None]


def test_what_cannot_be_shared_is_one_sentence(script: Script, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script("")
    named = (
        '2 ranks asked for with backend "nccl", but 1 GPU is visible. Use nproc=1, backend="gloo", or share_gpu=True.'
    )
    refused(named, path, backend="nccl")
    gloo = (
        'share_gpu=True asked for with backend "gloo", which needs no GPU. Use backend="nccl", or leave share_gpu out.'
    )
    refused(gloo, path, backend="gloo", share_gpu=True)
    refused('with backend "gloo"', path, env={wire.ENV_BACKEND: "gloo"}, share_gpu=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    none = r"share_gpu=True asked for, but 0 GPUs are visible \(CUDA_VISIBLE_DEVICES=\). Use backend=.gloo. without it"
    refused(none, path, share_gpu=True)
    monkeypatch.setattr("ddpkit.launcher.options.torch_has_cuda", lambda: False)
    refused("share_gpu=True asked for, but this torch was built without CUDA. Use backend", path, share_gpu=True)


@pytest.mark.job
def test_a_job_that_shares_is_told_so_and_says_so(script: Script, gpus: Gpus) -> None:
    run = ddpkit.launch(script(TOLD), share_gpu=True, show=False, timeout=60)
    assert (run.backend, run.facts) == ("nccl", "2 ranks · nccl on 1 GPU, shared")
    assert [rank.stdout for rank in run.ranks] == [SHARED, SHARED]
    assert str(run) == f"train → passed · 2 ranks\n  note: {NOTE}"
    assert NOTE.replace("'", "&#x27;") in run._repr_html_()


@pytest.mark.job
def test_its_command_starts_the_same_without_ddpkit(script: Script, gpus: Gpus) -> None:
    run = ddpkit.launch(script(TOLD), share_gpu=True, show=False, timeout=60)
    done = subprocess.run(["bash", "-c", run.command], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout == 2 * SHARED, done.stderr


@pytest.mark.job
def test_what_the_user_has_set_stays(script: Script, gpus: Gpus) -> None:
    run = ddpkit.launch(script(TOLD), env={"NCCL_NET": "IB"}, share_gpu=True, show=False, timeout=60)
    assert "NCCL_NET=IB NCCL_P2P_DISABLE=1" in run.ranks[0].stdout
    assert "NCCL_NET=IB" in run.command and "NCCL_NET=Socket" not in run.command


@pytest.mark.job
def test_with_a_gpu_for_each_rank_it_changes_nothing(script: Script, gpus: Gpus) -> None:
    gpus(2)
    run = ddpkit.launch(script(TOLD), share_gpu=True, show=False, timeout=60)
    assert "NCCL_NET=None" in run.ranks[0].stdout and "DDPKIT_SHARE_GPU=None" in run.ranks[0].stdout
    assert run.facts == "2 ranks · nccl on 2 GPUs"
    assert run.notes == ("share_gpu changed nothing: each rank has a GPU of its own.",)


@pytest.mark.job
def test_the_cell_magic_shares_too(home: Path, gpus: Gpus) -> None:
    names: dict[str, ddpkit.Run] = {}
    magic.torchrun("--nproc-per-node 3 --share-gpu --quiet --timeout 60 --as shared", TOLD, names)
    assert names["shared"].facts == "3 ranks · nccl on 1 GPU, shared" and names["shared"].ranks[2].stdout == SHARED


@pytest.mark.job
@pytest.mark.parametrize("words", [["run", "--share-gpu", "train.py"], ["smoke", "--share-gpu"]], ids=lambda w: w[0])
def test_the_commands_take_it_and_refuse_it_where_no_gpu_is_visible(script: Script, words: list[str]) -> None:
    script(TOLD)
    command = [str(Path(sys.executable).with_name("ddpkit")), *words]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 2
    assert done.stderr.startswith("ddpkit: launch: share_gpu=True asked for, but ") and done.stderr.count("\n") == 1


# In the ranks.


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has torch seem to have NCCL and one GPU, called GPU-a."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-a"))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    for name in (wire.ENV_SHARE_GPU, "NCCL_HOSTID"):
        monkeypatch.delenv(name, raising=False)


def places() -> list[Place]:
    return [Place(rank, 2, rank, 2, "localhost", 29500, alone=False) for rank in range(2)]


def test_ranks_that_share_take_the_gpus_in_turn(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wire.ENV_SHARE_GPU, "1")
    roll = [backends.own_facts(place, "nccl", fallback=False) for place in places()]
    assert backends.decide(roll).backend == "nccl"
    assert str(process_group._device("nccl", places()[1])) == "cuda:0"
    assert os.environ["NCCL_HOSTID"] == "rank1"
    monkeypatch.setenv("NCCL_HOSTID", "mine")
    process_group._device("nccl", places()[1])
    assert os.environ["NCCL_HOSTID"] == "mine"


def test_ranks_that_were_not_told_to_share_do_not(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal names the option; and a rank without any GPU has none to share."""
    roll = [backends.own_facts(place, "nccl", fallback=False) for place in places()]
    refusal = r"rank 1 sees 1 GPU, and its LOCAL_RANK is 1; use .* or share the GPUs by launch\(share_gpu=True\)\."
    with pytest.raises(ValueError, match=refusal):
        backends.decide(roll)
    assert str(process_group._device("nccl", places()[1])) == "cuda:1" and "NCCL_HOSTID" not in os.environ
    monkeypatch.setenv(wire.ENV_SHARE_GPU, "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert backends.own_facts(places()[0], "nccl", fallback=False).no_nccl == "sees 0 GPUs, and its LOCAL_RANK is 0"
