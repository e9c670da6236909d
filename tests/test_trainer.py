"""The trainer: every injected fault once, what it decides alike on all ranks, its options, and what it adds to a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import has_fully_shard
from survival import FAULTS, SIZES, Fault, outcome, parameters, trained

import ddpkit
from ddpkit.rank.trainer.faults import Fault as Injected
from ddpkit.rank.trainer.progress import lost_workers, slow_ranks

pytestmark = [pytest.mark.job, pytest.mark.xdist_group("trainer")]
Script = Callable[..., str]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the training runs that the others are compared with."""
    return tmp_path_factory.mktemp("survival")


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.kind)
def test_a_training_survives_or_ends_at_once_by_the_rank_at_fault(home: Path, compared: Path, fault: Fault) -> None:
    found = outcome(compared, fault, rank=1, step=10)
    assert not found.wrong, f"{found.wrong}\n{found.run}\n{[r.stderr[-3000:] for r in found.run.ranks]}"


@pytest.mark.parametrize("step", [1, 19, 35])
def test_a_kill_between_any_two_steps_costs_no_bit(home: Path, compared: Path, step: int) -> None:
    found = outcome(compared, FAULTS["kill"], rank=step % 2, step=step)
    assert not found.wrong, f"{found.wrong}\n{found.run}"


def test_uneven_data_are_refused_by_every_rank_before_the_first_step(home: Path) -> None:
    run = trained(home, 2, restarts=0, fault="uneven:1:0")
    assert (run.state, run.culprit) == ("failed", "every rank"), str(run)
    assert all("rank 0 has 18 batches, rank 1 has 17" in r.stderr for r in run.ranks)
    assert "epoch 0" not in run.ranks[0].stdout


def test_more_steps_left_out_than_allowed_end_the_job_by_the_rank_whose_loss_it_is(home: Path) -> None:
    run = trained(home, 2, restarts=0, fault="nan:1:2", max_errors_per_epoch=0)
    assert (run.state, run.culprit) == ("failed", 1), str(run)
    said = "1 steps of epoch 0 were left out because the loss of rank 1 was not finite, and max_errors_per_epoch is 0"
    assert all(said in r.stderr for r in run.ranks)


@pytest.mark.parametrize(
    "options",
    [
        {"static_graph": True, "gradient_as_bucket_view": False},
        {"gradient_accumulation_steps": 4, "find_unused_parameters": True},
        {"precision": "bf16", "scheduler": "constant"},
        {"precision": "fp16"},
        pytest.param({"parallel": "fsdp", "gradient_accumulation_steps": 2}, marks=has_fully_shard),
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_what_is_killed_goes_on_alike_with_other_options(home: Path, options: dict[str, Any]) -> None:
    whole = trained(home / "whole", 2, 0, max_steps=8, **options)
    killed = trained(home / "killed", 2, 1, max_steps=8, fault="kill:1:6", **options)
    assert whole.ok and killed.ok, f"{whole}\n{killed}\n{[r.stderr[-2000:] for r in whole.ranks]}"
    assert len(killed.attempts) == 2 and killed.reported[0]["resumed_from"] == 4
    keep = ("steps", "loss", "evaluation", "skipped")
    assert [killed.reported[0][k] for k in keep] == [whole.reported[0][k] for k in keep]
    if options.get("parallel") != "fsdp":
        first, second = parameters(home / "whole"), parameters(home / "killed")
        assert all(first[name].equal(second[name]) for name in first)


def test_accumulation_is_one_large_batch_and_the_last_window_counts_as_it_is(home: Path) -> None:
    """36 batches of 4 in windows of 8: the fifth window has 4. The steps are those of one process with windows of 16."""
    options = {"dropout": 0.0, "num_epochs": 1, "max_grad_norm": 0.0, "batch_size": 4}
    several = trained(home / "several", 2, 0, gradient_accumulation_steps=8, **options)
    once = trained(home / "once", 2, 0, **(options | {"batch_size": 32}))
    assert several.reported[0]["steps"] == once.reported[0]["steps"] == 5, f"{several}\n{once}"
    first, second = parameters(home / "several"), parameters(home / "once")
    assert max(float((first[n] - second[n]).abs().max()) for n in first) < 1e-4


def test_all_ranks_stop_together_at_the_target_loss(home: Path) -> None:
    run = trained(home, 2, 0, target_loss=3.5)
    assert run.ok, str(run)
    assert run.reported[0] | {"memory": 0} == run.reported[1] | {"memory": 0}
    assert run.reported[0]["ended_by"] == "target loss 3.5 reached" and run.reported[0]["steps"] < 36


def test_another_training_in_the_same_folder_is_refused_or_set_aside(home: Path) -> None:
    assert trained(home, 2, 0, max_steps=4).ok
    again = trained(home, 2, 0, max_steps=4)
    assert again.ok and again.reported[0]["resumed_from"] == 4
    other = trained(home, 2, 0, max_steps=4, learning_rate=0.5)
    assert other.state == "failed" and other.culprit == "every rank", str(other)
    assert "is from another run: training.learning_rate is 0.003 there and 0.5 here." in other.ranks[0].stderr
    afresh = trained(home, 2, 0, max_steps=4, learning_rate=0.5, resume="never")
    assert afresh.ok and afresh.reported[0]["resumed_from"] == 0
    assert [p.name for p in (home / "checkpoints" / "earlier_1").iterdir()] == ["step_00000004"]


OWN = """
import sys, torch
from torch import nn
from ddpkit.rank import TrainConfig, report, setup, train

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.one, self.other = nn.BatchNorm1d(3), nn.Linear(3, 1), nn.Linear(3, 1)
        self.steps = 0
    def forward(self, x):
        self.steps += self.training
        return self.one(self.norm(x)) + ({branch} and self.other(x))

x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
config = TrainConfig(batch_size=5, num_epochs=3, learning_rate=0.05, warmup_steps=0, target_loss=0.0, num_workers=0,
                     checkpoint_interval=0, save_interval=1)
outcome = train(config, model=Branching(), loss=nn.MSELoss(), dataset=data, evaluation=data{optimizer})
report(evaluation_by_all=outcome.evaluation)
"""


def test_a_model_of_ones_own_with_batch_norm_and_an_optimizer_that_is_not_fused(home: Path, script: Script) -> None:
    own = ", optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True)"
    run = ddpkit.launch(script(OWN.format(branch="True", optimizer=own)), backend="gloo", timeout=120, show=False)
    assert run.ok, f"{run}\n{run.ranks[0].stderr}"
    assert run.reported[0]["evaluation"] == run.reported[1]["evaluation"] < 0.5
    assert (run.reported[0]["steps"], run.reported[0]["epochs"]) == (15, 3)
    assert (home / "logs" / "rank_1.log").read_text().count("epoch 2 is done") == 1
    assert "epoch 2 is done" not in run.ranks[1].stdout
    shown = [line.rpartition("\r")[2] for line in run.ranks[0].stdout.split("\n")]
    assert not [line for line in shown if "step/s" in line and "DDP-INFO" in line]


def test_a_reduction_error_names_the_parameters(script: Script) -> None:
    run = ddpkit.launch(
        script(OWN.format(branch="self.steps < 3", optimizer="")), backend="gloo", timeout=120, show=False
    )
    assert run.state == "failed" and run.diagnosis.name == "unused_parameters", str(run)
    assert "rank 1: no gradient in the step before for other.weight, other.bias." in run.ranks[1].stderr


# What it adds to a step.

COUNTED = """
import sys, torch
from torch.nn.parallel import DistributedDataParallel as DDP
from ddpkit.rank import SmallTransformer, TrainConfig, Trainer, report, setup
from ddpkit.rank.trainer.example import language_model_loss

WAITS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")

def counted(step):
    with torch.profiler.profile() as profile:
        step()
    names = [event.name for event in profile.events()]
    return [sum(n.startswith("gloo:") for n in names), sum(n in WAITS for n in names)]

config = TrainConfig.from_args(sys.argv[1:])
with setup() as here:
    ddp = DDP(SmallTransformer(config))
    optimizer = torch.optim.AdamW(ddp.parameters(), fused=True)
    tokens = torch.zeros(8, 16, dtype=torch.int64)

    def by_hand():
        language_model_loss(ddp(tokens), tokens).backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    by_hand(), by_hand()
    bare = counted(by_hand)
    trainer = Trainer(config, here)
    step, seen = trainer._train_step, []

    def watched(window, data_s):
        seen.append(counted(lambda: step(window, data_s)) if trainer.step in (5, 6) else step(window, data_s))

    trainer._train_step = watched
    trainer.train()
    report(bare=bare, ours=[each for each in seen if each])
"""


def test_a_step_adds_no_collective_and_waits_for_nothing_that_a_bare_loop_does_not(home: Path, script: Script) -> None:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in {**SIZES, "log_interval": 100}.items()]
    run = ddpkit.launch(script(COUNTED), args=words, backend="gloo", timeout=120, show=False)
    assert run.ok, f"{run}\n{run.ranks[0].stderr}"
    for said in run.reported.values():
        # On the CPU the fused AdamW itself reads a step count for each parameter; on a GPU it does not.
        assert said["ours"] == [said["bare"]] * 2 and said["bare"][0] == 1


def test_a_fault_that_cannot_be_is_one_sentence() -> None:
    with pytest.raises(
        ValueError, match=r'fault "melt:1:2" is not KIND:RANK:STEP with a kind of kill, worker, nan, oom'
    ):
        Injected.parse("melt:1:2")


@pytest.mark.parametrize(
    ("before", "now", "lost"),
    [
        ([1, 1], [0, 1], [0]),
        ([0, 1], [0, 0], []),
        ([2, 2], [1, 1], [0, 1]),
        ([1, 1, 1], [1, 0, 0], [1, 2]),
        ([4, 4], [4, 4], []),
    ],
)
def test_who_lost_a_worker_is_not_who_takes_as_few_after_it(before: list[int], now: list[int], lost: list[int]) -> None:
    assert lost_workers(dict(enumerate(before)), dict(enumerate(now))) == lost


@pytest.mark.parametrize(
    ("own_ms", "said"),
    [
        ([(1, 30), (1, 31)], ""),
        ([(1, 30), (1, 80)], "rank 1 holds up the others by forward: 80 ms of a step, the middle rank 30 ms"),
        (
            [(60, 30), (2, 30), (2, 30)],
            "rank 0 holds up the others by loading data: 60 ms of a step, the middle rank 2 ms",
        ),
        ([(1, 3), (1, 8)], ""),
    ],
)
def test_who_is_slow_is_told_by_what_nobody_waits_in(own_ms: list[tuple[float, float]], said: str) -> None:
    assert slow_ranks(own_ms, step_ms=100) == said


BY_STEPS = """
import torch
from torch import nn
from ddpkit.rank import TrainConfig, Trainer, report, setup

x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
config = dict(batch_size=4, warmup_steps=0, target_loss=0.0, num_workers=0, save_checkpoints=False, eval_fraction=0.0)
with setup() as here:
    trainer = Trainer(TrainConfig(**config), here, model=nn.Linear(3, 1), loss=nn.MSELoss(), dataset=data)
    first = trainer.train(num_steps=1, warmup_steps=0)
    second = trainer.train(num_steps=25)
    report(first=first.steps, second=second.steps, epochs=second.epochs)
"""


def test_a_training_stops_after_so_many_steps_and_goes_on(home: Path, script: Script) -> None:
    run = ddpkit.launch(script(BY_STEPS), nproc=1, backend="gloo", timeout=120, show=False)
    assert run.ok, f"{run}\n{run.ranks[0].stderr}"
    said = run.reported[0]
    # 10 batches make an epoch; one was left after its first step.
    assert (said["first"], said["second"], said["epochs"]) == (1, 25, 2)


def test_the_data_that_are_brought_along_are_those_that_the_batch_is_judged_by(home: Path, script: Script) -> None:
    run = ddpkit.launch(
        script(
            """
            import torch
            from ddpkit.rank import TrainConfig, train
            data = torch.utils.data.TensorDataset(torch.randn(20_000, 3), torch.randn(20_000, 1))
            parts = dict(model=torch.nn.Linear(3, 1), loss=torch.nn.MSELoss(), dataset=data)
            train(TrainConfig(batch_size=10_000, num_epochs=1, num_workers=0, save_checkpoints=False), **parts)
            train(TrainConfig(batch_size=10_001, num_epochs=1, num_workers=0, save_checkpoints=False), **parts)
            """
        ),
        backend="gloo",
        timeout=120,
        show=False,
    )
    assert run.culprit == "every rank" and run.diagnosis.name == "config_error", str(run)
    assert "done after 1 steps" in run.ranks[0].stdout
    assert "training.batch_size 10001 on 2 ranks takes 20002 samples for one step" in run.ranks[0].stderr
