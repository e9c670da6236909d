"""Faults for testing that a training run survives them: `--fault kill:1:7` kills rank 1 in step 7.

A fault happens once, in the first attempt of the job.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from ddpkit.rank.loading.loader import safe_loader

from .loop import Trainer

KINDS = {
    "kill": "the rank is killed (SIGKILL)",
    "worker": "a worker of the rank's loader is killed",
    "nan": "the rank's outputs are not finite in that step",
    "oom": "the rank asks for more memory than there is",
    "hang": "the rank stands still",
    "slow": "the rank takes 50 ms more in each step from there on",
    "torn": "the newest checkpoint loses its second half, and the rank is killed",
    "uneven": "the rank has a batch less than the others, from the start",
}
SLOWER_S, FOR_EVER_S = 0.05, 100_000


@dataclass(frozen=True)
class Fault:
    """What goes wrong, on which rank, in which step (counted from 0)."""

    kind: str
    rank: int
    step: int

    @classmethod
    def parse(cls, text: str) -> Fault:
        """From `kind:rank:step`."""
        kind, _, rest = text.partition(":")
        rank, _, step = rest.partition(":")
        if kind not in KINDS or not rank.isdigit() or not step.isdigit():
            raise ValueError(f'fault "{text}" is not KIND:RANK:STEP with a kind of {", ".join(KINDS)}.')
        return cls(kind, int(rank), int(step))


def inject(fault: Fault, trainer: Trainer) -> None:
    """Prepare `fault` in `trainer`, if this is the first attempt of the job."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    if fault.kind == "uneven":
        indices, size = _uneven(trainer, fault), trainer.config.batch_size
        trainer.loader = safe_loader(trainer.dataset, size, here=trainer.here, sampler=indices, num_workers=0)
    elif fault.rank == trainer.here.rank:

        def strike(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
            if trainer.step < fault.step or not module.training:
                return output
            if fault.kind != "slow":
                hook.remove()
            return _strike(fault.kind, trainer, output)

        hook = trainer.spread.bare.register_forward_hook(strike)


def _strike(kind: str, trainer: Trainer, output: Any) -> Any:
    """Cause the fault in the middle of a forward; returns the output of that forward."""
    if kind == "nan":
        return output * float("nan")
    if kind == "oom":
        # More than any address space: the allocator itself refuses at once.
        torch.empty(2**55, dtype=torch.uint8, device=trainer.here.device)
    elif kind == "slow":
        time.sleep(SLOWER_S)
    elif kind == "hang":
        time.sleep(FOR_EVER_S)
    elif kind == "worker":
        # The youngest child is a worker of this rank's loader.
        max(psutil.Process().children(), key=lambda child: child.create_time()).kill()
    elif kind == "torn":
        newest = max(trainer.saves.folder.glob("step_????????"))
        os.truncate(newest / "model.pt", (newest / "model.pt").stat().st_size // 2)
    if kind in ("kill", "torn"):
        os.kill(os.getpid(), signal.SIGKILL)
    return output


def _uneven(trainer: Trainer, fault: Fault) -> Any:
    """The indices of this rank, one batch fewer on the rank of the fault."""
    here, size = trainer.here, trainer.config.batch_size
    indices = list(range(here.rank, len(trainer.dataset), here.world_size))
    return indices[:-size] if here.rank == fault.rank else indices
