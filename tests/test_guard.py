"""What ranks must have in common: each question asked of real ranks, where they agree and where they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ddpkit
from ddpkit import Run
from ddpkit.rank.guarding import deadline, guard

pytestmark = pytest.mark.job
Script = Callable[..., str]


def launch(path: str, **options: Any) -> Run:
    return ddpkit.launch(path, show=False, **{"timeout": 120, "backend": "gloo", **options})


def test_ranks_that_agree_and_ranks_that_do_not(script: Script) -> None:
    run = launch(
        script(
            """
            import torch
            from ddpkit.rank import all_finite, check_replicas, check_steps, report, setup

            def said(question, *given):
                try:
                    return question(*given)
                except RuntimeError as error:
                    return f"{type(error).__name__}: {error}"

            with setup() as here:
                torch.manual_seed(0)
                net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
                report(steps=said(check_steps, 7), other_steps=said(check_steps, 10 - here.rank, "batches"))
                report(same=said(check_replicas, net))
                with torch.no_grad():
                    net[0].bias[2] += 1e-7 * here.rank
                report(apart=said(check_replicas, net))
                wide = torch.nn.Linear(4, 4 + here.rank)
                report(models=said(check_replicas, wide))
                value = torch.tensor([1.0, float("inf") if here.rank else 2.0])
                report(finite=all_finite(torch.ones(3)), spoilt=all_finite(torch.ones(2), value))
            """
        )
    )
    assert run.ok, str(run)
    assert run.reported[0] == run.reported[1]
    said = run.reported[0]
    assert (said["steps"], said["same"], said["finite"], said["spoilt"]) == (None, None, True, False)
    assert said["other_steps"].startswith(
        "StepsDiffer: the ranks would take different numbers of batches (rank 0: 10, rank 1: 9)"
    )
    assert "rank 0 and rank 1 differ in 1 of 7 tensors, first 0.bias" in said["apart"]
    assert said["models"].startswith("ReplicasDiffer: the ranks hold different models: other names or shapes on rank")


def test_of_three_ranks_the_odd_one_is_named(script: Script) -> None:
    run = launch(
        script(
            """
            import torch
            from ddpkit.rank import check_replicas, setup

            with setup() as here:
                net = torch.nn.Linear(4, 4)
                with torch.no_grad():
                    net.weight.fill_(1.0), net.bias.fill_(float(here.rank == 1))
                check_replicas(net)
            """
        ),
        nproc=3,
    )
    assert run.state == "failed"
    assert all("rank 1 differs from the other ranks in 1 of 2 tensors, first bias" in r.stderr for r in run.ranks), str(
        run
    )


def test_unused_parameters_are_named_by_what_has_no_gradient() -> None:
    net = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "left_out": torch.nn.Linear(2, 2)})
    net["used"](torch.ones(1, 2)).sum().backward()
    assert guard.unused_parameters(net) == ["left_out.weight", "left_out.bias"]


# A deadline.

STEPS = """
import os, signal, time, torch
import torch.distributed as dist
from ddpkit.rank import Deadline, setup

with setup() as here, Deadline(2.0, here) as deadline:
    for step in range(3):
        deadline.at("data", step)
        if step == 1 and here.rank == 1:
            {fault}
        deadline.at("forward", step)
        dist.all_reduce(torch.ones(1))
        deadline.rest()
        if step == 2:
            time.sleep(2.5)
print("done")
"""


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("time.sleep(1000)", "rank 1 is still in the data of step 1, line 9: time.sleep(1000); the others wait."),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "rank 1 did not answer when asked where it is."),
    ],
)
def test_a_step_past_its_deadline_ends_the_job_by_the_rank_that_holds_it_up(
    script: Script, fault: str, told: str
) -> None:
    run = launch(script(STEPS.format(fault=fault)), stall=60)
    assert run.state == "failed", str(run)
    # The first rank to end may do so before the other has come to speak.
    said = "".join(rank.stderr for rank in run.ranks)
    assert f"StepDeadline: step 1 has taken more than 2 s: {told}" in said
    assert run.culprit == 1, str(run)


def test_a_deadline_that_is_kept_is_not_heard_of(script: Script) -> None:
    run = launch(script(STEPS.format(fault="time.sleep(0.5)")))
    assert run.ok and run.ranks[1].stdout == "done\n" and "Deadline" not in run.ranks[0].stderr, str(run)


def test_where_every_rank_is_at_the_same_place_no_one_is_singled_out() -> None:
    at = deadline.Position(4, "forward", "line 3: x = net(x)")
    assert deadline.held_up_by({0: at, 1: at}, 2) == (
        [0, 1],
        "every rank is in the forward of step 4, line 3: x = net(x)",
    )


def test_a_deadline_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="Deadline: 0 seconds asked for; give more than 0, or None"):
        deadline.Deadline(0, None)  # type: ignore[arg-type]
