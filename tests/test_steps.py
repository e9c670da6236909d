"""What is written down at a rank's optimizer steps, and how it is compared: whole, strided, sharded, with gaps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import has_fully_shard

import ddpkit
from ddpkit.runfolder import steps, wire

pytestmark = pytest.mark.job

SETUP = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
"""
LOOP = """
data = torch.randn(4, 8, 16)
for step in range(4):
    optimizer.zero_grad()
    net(data[step].chunk(world)[rank]).square().mean().backward()
    optimizer.step()
"""


def launched(path: str, nproc: int = 2) -> ddpkit.Run:
    run = ddpkit.launch(path, nproc=nproc, env={wire.ENV_STEPS: "1"}, show=False, timeout=120)
    assert run.ok, str(run)
    return run


def steps_applied(run: ddpkit.Run) -> list[int]:
    """How many optimizer steps each rank applied."""
    return [recorded.steps for recorded in steps.recorded(run.ranks)]


BIG = "nn.Sequential(nn.Linear(16, 700), nn.Linear(700, 700))"
SMALL = "nn.Sequential(nn.Linear(16, 5), nn.Linear(5, 4))"
ZERO = "from torch.distributed.optim import ZeroRedundancyOptimizer as Zero"


@pytest.mark.parametrize(
    "make",
    [
        f"net = DDP({SMALL}); optimizer = torch.optim.SGD(net.parameters(), lr=0.1)",
        # More values than are kept: every so-many-th is.
        f"net = DDP({BIG}); optimizer = torch.optim.SGD(net.parameters(), lr=0.1)",
        f"{ZERO}; net = DDP({SMALL}); optimizer = Zero(net.parameters(), torch.optim.SGD, lr=0.1)",
    ],
    ids=["whole", "strided", "zero"],
)
def test_replicas_are_equal_and_as_in_one_process(script: Callable[..., str], make: str) -> None:
    path = script(f"{SETUP}\n{make}\n{LOOP}")
    both, alone = launched(path), launched(path, nproc=1)
    assert steps_applied(both) == [4, 4] and len(steps.apart_by_step(both.ranks)) == 4
    assert steps.equal(steps.replicas_apart(both.ranks)) and steps.equal(steps.off_one_process(both.ranks, alone.ranks))
    found = steps.recorded(both.ranks)[0]
    assert sum(found.lengths) <= 200_000 and all("module" not in name for name in found.names)


@has_fully_shard
def test_the_parts_of_a_sharded_model_are_put_together(script: Callable[..., str]) -> None:
    sharded = script(
        f"{SETUP}\nfrom torch.distributed.fsdp import fully_shard\nnet = nn.Sequential(nn.Linear(16, 5), nn.Linear(5, 3))\n"
        f"fully_shard(net); optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n{LOOP}"
    )
    plain = script(
        f"{SETUP}\nnet = nn.Sequential(nn.Linear(16, 5), nn.Linear(5, 3))\n"
        f"optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n{LOOP}",
        "plain.py",
    )
    both, alone = launched(sharded), launched(plain, nproc=1)
    assert all(r.sharded for r in steps.recorded(both.ranks)) and steps.replicas_apart(both.ranks) is None
    assert steps.equal(steps.off_one_process(both.ranks, alone.ranks))


def test_replicas_that_part_are_found_at_the_step_where_they_do(script: Callable[..., str]) -> None:
    make = "net = nn.Linear(16, 4); optimizer = torch.optim.SGD(net.parameters(), lr=0.1)"
    run = launched(script(f"{SETUP}\n{make}\n{LOOP}"))
    apart = steps.apart_by_step(run.ranks)
    assert apart[0] > 1e-3 and not steps.equal(steps.replicas_apart(run.ranks))


def test_a_value_that_is_no_number_is_infinitely_far_off(script: Callable[..., str]) -> None:
    make = "net = DDP(nn.Linear(16, 4)); optimizer = torch.optim.SGD(net.parameters(), lr=float('inf'))"
    run = launched(script(f"{SETUP}\n{make}\n{LOOP}"))
    assert steps.replicas_apart(run.ranks) == float("inf") and not steps.equal(steps.replicas_apart(run.ranks))


def test_the_first_of_two_optimizers_is_followed(script: Callable[..., str]) -> None:
    make = (
        "net = DDP(nn.Linear(16, 4)); optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)"
    )
    loop = LOOP.replace("    optimizer.step()", "    optimizer.step(); other.step()")
    assert steps_applied(launched(script(f"{SETUP}\n{make}\n{loop}"))) == [4, 4]


def test_a_job_that_does_not_ask_for_it_writes_nothing(script: Callable[..., str]) -> None:
    make = "net = DDP(nn.Linear(16, 4)); optimizer = torch.optim.SGD(net.parameters(), lr=0.1)"
    run = ddpkit.launch(script(f"{SETUP}\n{make}\n{LOOP}"), show=False, timeout=120)
    assert run.ok and steps.recorded(run.ranks) == () and steps.replicas_apart(run.ranks) is None


def test_a_rank_killed_in_the_middle_leaves_what_it_had(script: Callable[..., str]) -> None:
    make = "net = DDP(nn.Linear(16, 4)); optimizer = torch.optim.SGD(net.parameters(), lr=0.1)"
    loop = LOOP.replace(
        "    optimizer.step()", "    optimizer.step()\n    if rank == 1 and step == 2: os.kill(os.getpid(), 9)"
    )
    run = ddpkit.launch(script(f"{SETUP}\n{make}\n{loop}"), env={wire.ENV_STEPS: "1"}, show=False, timeout=120)
    assert run.culprit == 1 and steps_applied(run) == [3, 3]
    assert len(steps.apart_by_step(run.ranks)) == 3 and steps.replicas_apart(run.ranks) is None
