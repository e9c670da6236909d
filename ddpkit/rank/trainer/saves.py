"""What a trainer saves and loads: all that its next step depends on. `saving/checkpoint.py` writes the files."""

from __future__ import annotations

import logging
import os
from typing import Any

from ddpkit.rank.joining.process_group import Here
from ddpkit.rank.saving.checkpoint import CheckpointError, Checkpoints, Found
from ddpkit.settings.training import TrainConfig

from .optimization import Optimization
from .parallel import Replicated, Sharded

logger = logging.getLogger("ddpkit.rank")


class Saves:
    """A trainer's checkpoints. A run that ended anywhere goes on from one with the same losses, bit for bit."""

    def __init__(
        self, config: TrainConfig, here: Here, spread: Replicated | Sharded, optimization: Optimization
    ) -> None:
        self._config, self._spread, self._optimization = config, spread, optimization
        self._checkpoints = Checkpoints(config.checkpoint_dir, here, config.keep_checkpoints)
        self.folder = self._checkpoints.folder
        self._saved = -1

    def save(self, step: int, told: dict[str, Any], own: dict[str, Any]) -> None:
        """Save model, optimizer, schedule and scale with `told`, and each rank's `own`; nothing if this step is saved."""
        if not self._config.save_checkpoints or self._saved == step:
            return
        state = self._spread.state(self._optimization.optimizer)
        shared = {**told, "config": self._config.to_dict(), **self._optimization.state()}
        if self._spread.sharded:
            self._checkpoints.save(step, shared, own, state)
        else:
            self._checkpoints.save(step, shared | state, own)
        self._saved = step

    def newest(self) -> Found | None:
        """The checkpoint to go on from, if any. `resume=never` sets the old ones aside, except after a restart."""
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if self._config.resume == "never" and not restarted:
            if aside := self._checkpoints.set_aside():
                logger.warning("the checkpoints of an earlier training run are now in %s", aside)
            return None
        return self._checkpoints.newest()

    def load(self, found: Found) -> tuple[dict[str, Any], dict[str, Any]]:
        """Load what `save` saved, random states too; return `told` and this rank's `own`."""
        shared, own = self._checkpoints.load(found)
        if different := self._config.changes_training(shared["config"]):
            raise CheckpointError(
                f"{found.folder} is from another run: {different}. Go on with those values, give another checkpoint_dir, "
                "or resume=never, which sets the old checkpoints aside."
            )
        if self._spread.sharded:
            shared |= self._checkpoints.load_sharded(found, self._spread.state(self._optimization.optimizer))
        self._spread.load(shared, self._optimization.optimizer)
        self._optimization.load(shared)
        self._saved = found.step
        logger.info("goes on from %s: %d steps are done", found.folder, found.step)
        return shared, own
