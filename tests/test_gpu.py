"""What needs an NVIDIA GPU: NCCL, ranks that share one, its memory, 16 bits. Skipped where there is none."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ddpkit
from ddpkit.errors import LaunchError
from ddpkit.launcher import options
from ddpkit.machine import devices
from ddpkit.processes import zygote

GPUS = len(devices.visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))) if options.torch_has_cuda() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.job,
    pytest.mark.skipif(not GPUS, reason="needs an NVIDIA GPU, and a torch that can use it"),
]

Script = Callable[..., str]

HOLDS = """
import time
import torch
from ddpkit.rank import setup

with setup() as here:
    held = torch.ones(1 << 26, device=here.device)
    print("holds", flush=True)
    time.sleep(5)
"""
RUNS_OUT = """
import torch
from torch import nn
from ddpkit.rank import memory_budget, setup

with setup() as here:
    memory_budget(256)
    kept = [torch.ones(1 << 22, device=here.device) for _ in range(100)]
"""
RAISES = """
import torch
import torch.distributed as dist
from ddpkit.rank import setup

with setup(timeout_s=30) as here:
    for step in range(5):
        if step == 3 and here.rank == 1:
            raise KeyError("label")
        dist.all_reduce(torch.ones(4, device=here.device))
"""


def launch(target: str, **settings: object) -> ddpkit.Run:
    return ddpkit.launch(target, show=False, **{"timeout": 100, "backend": "nccl", "nproc": 1, **settings})  # type: ignore[arg-type]


def test_one_rank_communicates_by_nccl(home: Path) -> None:
    run = launch("ddpkit.rank.smoke")
    assert run.ok, f"{run}\n{run.ranks[0].stderr}"
    assert "[3/6] init: nccl, 1 rank" in run.ranks[0].stdout and "[4/6] device: cuda:0" in run.ranks[0].stdout


def test_more_ranks_than_gpus_are_refused_or_share(home: Path) -> None:
    with pytest.raises(LaunchError, match="or share_gpu=True"):
        launch("ddpkit.rank.smoke", nproc=GPUS + 1)
    run = launch("ddpkit.rank.smoke", nproc=GPUS + 1, share_gpu=True)
    assert run.ok, f"{run}\n{run.ranks[0].stderr}"
    assert f"[3/6] init: nccl, {GPUS + 1} ranks" in run.ranks[0].stdout
    assert run.notes[0].startswith(f"{GPUS + 1} ranks share {GPUS} GPU")


def test_the_rank_that_raises_is_named_where_ranks_share(script: Script) -> None:
    run = launch(script(RAISES), nproc=GPUS + 1, share_gpu=True)
    assert run.state == "failed" and run.culprit == 1, str(run)
    assert run.diagnosis is not None and run.diagnosis.name == "own_exception"


def test_the_warm_process_opens_no_gpu(script: Script, warm_process: None) -> None:
    run = launch(script(HOLDS), wait=False)
    until = time.monotonic() + 60
    while not (run.ranks and "holds" in run.ranks[0].stdout) and time.monotonic() < until:
        time.sleep(0.05)
    warm, rank = zygote._current, run.ranks[0].pid
    assert warm is not None and rank is not None
    opened = [os.path.realpath(file) for file in Path(f"/proc/{warm.pid}/fd").iterdir()]
    assert not [file for file in opened if file.startswith("/dev/nvidia")]
    used = devices.device_mib([warm.pid, rank])
    assert warm.pid not in used and used[rank][1] >= 256
    assert run.wait().ok and run.warm, f"{run}\n{run.started}"


def test_memory_that_runs_out_on_the_gpu_gives_its_page(script: Script) -> None:
    run = launch(script(RUNS_OUT))
    assert run.state == "failed" and run.diagnosis is not None and run.diagnosis.name == "out_of_memory_cuda", str(run)
    assert run.ranks[0].failure is not None and run.ranks[0].failure.type == "OutOfMemoryError"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_training_in_16_bits_comes_to_its_end(home: Path, precision: str) -> None:
    sizes = (
        "--vocab-size 64 --hidden-size 32 --num-layers 2 --num-heads 2 --seq-len 16 --dataset-size 256 --batch-size 8"
    )
    words = f"{sizes} --num-epochs 2 --warmup-steps 5 --learning-rate 0.01 --num-workers 1 --resume never --precision {precision}"
    run = launch("ddpkit.rank.training", args=words.split())
    assert run.ok, f"{run}\n{run.ranks[0].stderr}"
    assert run.reported[0]["skipped"] <= 2 and run.reported[0]["loss"] < 4
