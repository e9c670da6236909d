"""A job that passes with replicas that are apart says so, and a healthy one never does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ddpkit

pytestmark = [pytest.mark.job, pytest.mark.usefixtures("warm_process")]

# Each rank trains three steps on its own data; MODEL and STEP are a test's own.
PROGRAM = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
MODEL
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
END
"""
PLAIN = "model = DDP(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)))"
WITH_BUFFERS = "model = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))"
# Freed by the collector, which takes a model and what it wraps at once.
IN_A_CIRCLE = f"{PLAIN}\nmodel.itself = [model]"
HEAVIER = "if rank == 1:\n    with torch.no_grad():\n        model.module[1].weight += 0.5"
DESTROY = "dist.destroy_process_group()"


def program(model: str = PLAIN, end: str = DESTROY) -> str:
    return PROGRAM.replace("MODEL", model).replace("END", end)


@pytest.mark.parametrize(
    ("model", "end"),
    [
        (PLAIN, DESTROY),
        (PLAIN, "print('the group stays')"),
        # What happens to one model alone after the group is gone, as a test on rank 0, is not DDP's business.
        (PLAIN, f"{DESTROY}\n{HEAVIER}"),
        ("model = DDP(nn.Linear(4, 600_000))", DESTROY),
        ("halves = [dist.new_group([r]) for r in (0, 1)]\nmodel = DDP(nn.Linear(4, 1), process_group=halves[rank])\n"
         "other = DDP(nn.Linear(4, 1))", DESTROY),
    ],
    ids=["destroyed", "not destroyed", "changed later", "large", "one with a group of its own"],
)  # fmt: skip
def test_a_healthy_training_has_equal_replicas(model: str, end: str, script: Callable[..., str]) -> None:
    run = ddpkit.launch(script(program(model, end)), show=False)
    assert (run.ok, run.replicas, run.diagnosis) == (True, "equal", None), str(run)
    assert str(run) == "train → passed · 2 ranks"


@pytest.mark.parametrize(
    "end",
    [DESTROY, "", "import sys\nsys.exit(0)", f"del model, optimizer\n{DESTROY}"],
    ids=["destroyed", "end", "sys.exit", "freed before"],
)
def test_a_difference_is_told_with_the_first_parameter(end: str, script: Callable[..., str]) -> None:
    run = ddpkit.launch(script(program(end=f"{HEAVIER}\n{end}")), show=False)
    assert run.ok and run.replicas == "0.5 apart, first in 1.weight"
    assert run.headline == "train → passed, but the replicas are 0.5 apart · 2 ranks"
    assert run.diagnosis and run.diagnosis.name == "replicas_differ"
    assert "The replicas are 0.5 apart, first in 1.weight." in str(run) and "0.5 apart" in run._repr_html_()
    again = ddpkit.Run.from_folder(run.folder)
    assert str(again) == str(run)
    hidden = ddpkit.Run(run.folder, revealed=False)
    assert str(hidden) == "train → passed · 2 ranks"


def test_buffers_are_shown_and_raise_no_alarm(script: Callable[..., str]) -> None:
    run = ddpkit.launch(script(program(WITH_BUFFERS)), show=False)
    assert run.replicas == "equal" and run.diagnosis is None
    assert "apart, first in 1.running_mean" in run.replicas.buffers
    assert repr(run.replicas) == f"equal; buffers {run.replicas.buffers}"


def test_values_that_are_not_finite_on_one_rank_are_apart(script: Callable[..., str]) -> None:
    end = f"if rank == 1:\n    with torch.no_grad():\n        model.module[0].bias.fill_(float('nan'))\n{DESTROY}"
    run = ddpkit.launch(script(program(end=end)), show=False)
    assert run.replicas == "apart by values that are not finite, first in 0.bias"
    same = ddpkit.launch(script(program(end=end.replace("rank == 1", "True"))), show=False)
    assert same.replicas == "equal"


@pytest.mark.parametrize(
    ("model", "end"),
    [
        ("model = nn.Linear(4, 1)", DESTROY),
        (IN_A_CIRCLE, f"del model, optimizer\nimport gc\ngc.collect()\n{DESTROY}"),
        (PLAIN, "raise ValueError('at the end')"),
    ],
    ids=["no DDP", "gone by then", "failed"],
)
def test_nothing_is_said_where_nothing_can_be_compared(model: str, end: str, script: Callable[..., str]) -> None:
    run = ddpkit.launch(script(program(model, end)), show=False)
    assert run.replicas is None


def test_a_group_that_goes_by_an_exception_has_nothing_copied(script: Callable[..., str]) -> None:
    """The GPU of a rank that has failed may never answer."""
    end = f"try:\n    raise ValueError('caught')\nfinally:\n    {DESTROY}"
    run = ddpkit.launch(script(program(end=end)), show=False)
    assert run.state == "failed"
    assert not list(run.folder.rglob("replicas.*"))


def test_who_expects_other_parameters_asks_for_nothing(script: Callable[..., str]) -> None:
    run = ddpkit.launch(script(program(end=f"{HEAVIER}\n{DESTROY}")), show=False, expect_replicas=False)
    assert (run.ok, run.replicas, run.diagnosis) == (True, None, None)
    assert not list(run.folder.rglob("replicas.*"))
