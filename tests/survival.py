"""The table of injected faults: a small training job with each, run for real, compared with one that nothing happened to."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import ddpkit

# 18 steps an epoch with 2 ranks, 9 with 4; a checkpoint after every fourth.
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "seq_len": 16,
    "dataset_size": 320,
    "batch_size": 8,
    "num_epochs": 2,
    "learning_rate": 3e-3,
    "warmup_steps": 4,
    "num_workers": 1,
    "target_loss": 0.0,
    "checkpoint_interval": 4,
    "save_interval": 100,
    "log_interval": 4,
    "timeout_s": 60.0,
}
EVERY = SIZES["checkpoint_interval"]


@dataclass(frozen=True)
class Fault:
    """A kind of fault, what the first attempt ends with, and what is said of it.

    ends: "goes on", "restarts" or "refused".
    says: words in a rank's output that tell the fault and the rank, which stands for {rank}.
    """

    kind: str
    ends: str
    says: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def spoils(self) -> bool:
        """Whether a step is left out, so that the comparison is with a run that leaves out the same one."""
        return self.kind == "nan"


FAULTS = {
    fault.kind: fault
    for fault in (
        Fault("kill", "restarts", ""),
        Fault(
            "worker", "goes on", "the loader of rank {rank} lost a worker and goes on with 0", (("loader_retries", 1),)
        ),
        Fault("nan", "goes on", "the loss of rank {rank} was not finite in 1 of"),
        Fault("oom", "restarts", "rank {rank} ran out of memory in step {step}"),
        Fault("hang", "restarts", "rank {rank} is still in the forward of step {step}", (("step_deadline_s", 3.0),)),
        Fault("slow", "goes on", "rank {rank} holds up the others by forward"),
        Fault("torn", "restarts", "is skipped: model.pt has "),
        Fault("uneven", "refused", "rank {rank} has"),
    )
}


@dataclass(frozen=True)
class Outcome:
    """A run with a fault, beside one without: what is not as it should be, how long it took, the steps done twice."""

    wrong: str
    seconds: float
    steps_again: int
    run: ddpkit.Run


def trained(home: Path, nproc: int, restarts: int = 1, wait: bool = True, **changed: Any) -> ddpkit.Run:
    """Run the training with `changed` options; its checkpoints are in home/checkpoints."""
    options = {**SIZES, "checkpoint_dir": str(home / "checkpoints"), "log_dir": str(home / "logs"), **changed}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return ddpkit.launch(
        "ddpkit.rank.training",
        args=words,
        nproc=nproc,
        backend="gloo",
        max_restarts=restarts,
        timeout=240,
        show=False,
        wait=wait,
    )


def parameters(home: Path) -> dict[str, torch.Tensor]:
    """The model in the newest checkpoint."""
    newest = max((home / "checkpoints").glob("step_????????"))
    state: dict[str, torch.Tensor] = torch.load(newest / "model.pt", weights_only=True)["model_state"]
    return state


@cache
def undisturbed(home: Path, nproc: int, fault: str = "") -> dict[str, torch.Tensor]:
    """Parameters of the training that nothing happened to (or `fault`, which leaves out a step)."""
    run = trained(home, nproc, **({"fault": fault} if fault else {}))
    assert run.ok, str(run)
    return parameters(home)


def outcome(home: Path, fault: Fault, rank: int, step: int, nproc: int = 2) -> Outcome:
    """Run the training with `fault` in `step` of `rank`; below `home` those that it is compared with are kept."""
    compared = undisturbed(home / f"undisturbed_{nproc}", nproc)
    if fault.spoils:
        other = (rank + 1) % nproc
        compared = undisturbed(home / f"nan_{nproc}_{other}_{step}", nproc, f"nan:{other}:{step}")
    own = home / f"{fault.kind}_{nproc}_{rank}_{step}"
    since = time.monotonic()
    restarts = int(fault.ends == "restarts")
    run = trained(own, nproc, restarts, fault=f"{fault.kind}:{rank}:{step}", **dict(fault.options))
    seconds = time.monotonic() - since
    wrong = told_wrong(run, fault, rank, step) or (
        "" if fault.ends == "refused" else lost(own, run, fault, step, compared)
    )
    return Outcome(wrong, seconds, step - resumed_from(run) if fault.ends == "restarts" else 0, run)


def told_wrong(run: ddpkit.Run, fault: Fault, rank: int, step: int) -> str:
    """What is not true in how the job ended and in what was said of it."""
    first = run.attempts[0]
    if run.ok != (fault.ends != "refused") or len(run.attempts) != 1 + (fault.ends == "restarts"):
        return f"{run.state} after {len(run.attempts)} attempts"
    if fault.ends == "restarts" and [r.rank for r in first if r.role == "culprit"] != [rank]:
        return f"the culprit of the first attempt is not rank {rank}: {[r.role for r in first]}"
    said = "".join(r.stdout + r.stderr for attempt in run.attempts for r in attempt)
    if (words := fault.says.format(rank=rank, step=step)) not in said:
        return f"nobody said {words!r}"
    return ""


def lost(home: Path, run: ddpkit.Run, fault: Fault, step: int, wanted: dict[str, torch.Tensor]) -> str:
    """What was lost: steps beyond the last checkpoint, or a bit of a parameter."""
    if fault.ends == "restarts":
        # One checkpoint more is gone when the newest was torn.
        whole = max(0, step - step % EVERY - (EVERY if fault.kind == "torn" else 0))
        if resumed_from(run) != whole:
            return f"went on from step {resumed_from(run)} instead of {whole}"
    final = parameters(home)
    differ = [name for name, value in wanted.items() if not torch.equal(final[name], value)]
    return f"{len(differ)} of {len(wanted)} parameters differ, first {differ[0]}" if differ else ""


def resumed_from(run: ddpkit.Run) -> int:
    return int(run.reported[0]["resumed_from"])
