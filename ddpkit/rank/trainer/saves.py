"""What a training saves and how it goes on: all that its next step depends on. `saving/checkpoint.py` has the files."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ddpkit.rank.saving.checkpoint import CheckpointError, Checkpoints, Found

if TYPE_CHECKING:
    import torch

    from ddpkit.rank.joining.process_group import Here
    from ddpkit.rank.loading.loader import SafeLoader
    from ddpkit.settings.training import TrainConfig

    from .optimization import Optimization

logger = logging.getLogger("ddpkit.rank")


class Training(Protocol):
    """What a checkpoint is made from: a `Trainer`."""

    config: TrainConfig
    here: Here
    spread: Any
    optimization: Optimization
    loader: SafeLoader
    step: int
    epoch: int
    mean_loss: float
    score: float | None

    def forward(self, batch: Any) -> torch.Tensor:
        """The loss of a batch."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add its gradients to those that there are."""


class Saves:
    """The checkpoints of `trainer`. With them a training that was ended anywhere has the same losses again, bit for bit."""

    def __init__(self, trainer: Training) -> None:
        self._trainer = trainer
        self._checkpoints = Checkpoints(trainer.config.checkpoint_dir, trainer.here, trainer.config.keep_checkpoints)
        self._saved = -1

    @property
    def folder(self) -> Path:
        """Where the checkpoints lie."""
        return self._checkpoints.folder

    def save(self) -> None:
        """Save model, optimizer, schedule, scale, random states and where the data stand; nothing when that is saved already."""
        its = self._trainer
        if not its.config.save_checkpoints or self._saved == its.step:
            return
        state = its.spread.state(its.optimization.optimizer)
        shared = {"epoch": its.epoch, "loss": its.mean_loss, "score": its.score, "config": its.config.to_dict()}
        shared |= its.optimization.state()
        own = {"loader": its.loader.state_dict()}
        if its.spread.sharded:
            self._checkpoints.save(its.step, shared, own, state)
        else:
            self._checkpoints.save(its.step, shared | state, own)
        self._saved = its.step

    def resume(self) -> int:
        """Go on from the newest checkpoint that is whole, if there is one; the number of steps that were done."""
        its = self._trainer
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if its.config.resume == "never" and not restarted:
            if aside := self._checkpoints.set_aside():
                logger.warning("the checkpoints of an earlier training now lie in %s", aside)
            return 0
        found = self._checkpoints.newest()
        if found is None:
            return 0
        self._rehearse()
        shared, own = self._checkpoints.load(found)
        self._must_be_of_this_training(found, shared["config"])
        if its.spread.sharded:
            shared |= self._checkpoints.load_sharded(found, its.spread.state(its.optimization.optimizer))
        its.spread.load(shared, its.optimization.optimizer)
        its.optimization.load(shared)
        its.loader.load_state_dict(own["loader"])
        its.step, its.epoch, self._saved = found.step, shared["epoch"], found.step
        its.mean_loss, its.score = shared["loss"], shared["score"]
        logger.info("goes on from %s: %d steps are done", found.folder, found.step)
        return found.step

    def _must_be_of_this_training(self, found: Found, written: dict[str, Any]) -> None:
        if different := self._trainer.config.changes_training(written):
            raise CheckpointError(
                f"{found.folder} is of another training: {different}. Go on with those values, give another checkpoint_dir, "
                "or resume=never, which sets the old checkpoints aside."
            )

    def _rehearse(self) -> None:
        """One pass that is thrown away, before the state is loaded over it.

        DDP orders its buckets anew after the first backward, and with more than two ranks that order decides in which order
        the gradients of a parameter are added: the last bit of a sum depends on it.
        """
        its = self._trainer
        its.backward(its.forward(next(iter(its.loader))))
        its.optimization.optimizer.zero_grad(set_to_none=True)
