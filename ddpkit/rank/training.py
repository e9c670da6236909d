"""A whole training run as one program: `torchrun --nproc-per-node 2 -m ddpkit.rank.training`; `ddpkit train` starts it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sized
from dataclasses import asdict, replace
from typing import Any

from ddpkit.rank.joining.process_group import setup
from ddpkit.rank.logs import log_to
from ddpkit.rank.memory.budget import memory_budget
from ddpkit.rank.reports import report
from ddpkit.settings.training import ConfigError, TrainConfig

from .trainer.faults import Fault, inject
from .trainer.loop import Outcome, Trainer

logger = logging.getLogger("ddpkit.rank")


def train(config: TrainConfig, **parts: Any) -> Outcome:
    """Bring the process group up, train, and take it down again. `parts` are the other arguments of `Trainer`.

    Raises:
        ConfigError: with everything that is wrong in `config`.
        And what `setup` and `Trainer.train` raise.
    """
    log_to(config.log_dir or None, config.log_level, config.log_as_json)
    with setup(config.backend, config.timeout_s, config.fallback) as here:
        if faults := _with_its_data(config, parts).errors(here.world_size, here.device.type):
            raise ConfigError(faults)
        if config.memory_budget_mib:
            memory_budget(config.memory_budget_mib)
        samples = config.global_batch(here.world_size)
        logger.info("%d samples a step: %d on each of %d ranks", samples, samples // here.world_size, here.world_size)
        trainer = Trainer(config, here, **parts)
        if config.fault:
            inject(Fault.parse(config.fault), trainer)
        outcome = trainer.train()
        logger.info("done after %d steps (%s): loss %.4f", outcome.steps, outcome.ended_by, outcome.loss)
        report(**asdict(outcome))
    return outcome


def _with_its_data(config: TrainConfig, parts: dict[str, Any]) -> TrainConfig:
    """`config` with the size of the caller's own dataset, if there is one."""
    data = parts.get("dataset")
    return replace(config, dataset_size=len(data), eval_fraction=0.0) if isinstance(data, Sized) else config


def main(arguments: list[str]) -> int:
    """Train with the options of `TrainConfig.from_args`; exit code 2 if one of them is wrong."""
    try:
        config = TrainConfig.from_args(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    train(config)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
