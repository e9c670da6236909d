"""Bounds the steps that a training run skips, and explains the errors that end it; for `loop.py`.

Only a step that every rank skips leaves the replicas equal: one whose averaged gradients are not finite. Any other error
ends the job at once, and the job goes on from its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from ddpkit.rank.guarding.guard import BlamesRanks
from ddpkit.rank.joining.process_group import Here
from ddpkit.rank.joining.words import in_words
from ddpkit.rank.memory.budget import is_out_of_memory
from ddpkit.settings.training import TrainConfig

from .optimization import Optimization


class TooManyErrors(BlamesRanks):
    """More steps of an epoch were skipped than `max_errors_per_epoch` allows, because of the losses of ranks `at_fault`."""


class Recovery:
    """Counts the skipped steps of an epoch, by figures that are the same on every rank, so that all end together."""

    def __init__(self, config: TrainConfig, here: Here, optimization: Optimization) -> None:
        self._most, self._here, self._optimization = config.max_errors_per_epoch, here, optimization
        self._skipped_before, self._spoilt = 0, 0
        self._without_gradient: list[str] = []

    def begin_epoch(self) -> None:
        """Count from 0 again."""
        self._skipped_before, self._spoilt = int(self._optimization.skipped), 0

    def bound(self, epoch: int, not_finite: Mapping[int, int]) -> None:
        """End the training if too many steps of `epoch` were skipped.

        Args:
            not_finite: by rank, how many of its losses were not finite since the last call.
        """
        self._spoilt += max(not_finite.values(), default=0)
        # fp16 finds its scale by steps that overflow: those are no errors if the losses are finite.
        errors = self._spoilt if self._optimization.scaler else int(self._optimization.skipped) - self._skipped_before
        if errors <= self._most:
            return
        whose = f"the loss of {in_words(sorted(not_finite))}" if not_finite else "the gradients, of finite losses"
        raise TooManyErrors(
            f"{errors} steps of epoch {epoch} were left out because {whose} was not finite, and max_errors_per_epoch is "
            f"{self._most}. Look at the data and the learning rate.",
            at_fault=sorted(not_finite),
        )

    def look_at(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Remember which `parameters` have no gradient: DDP notices it one step later, and does not name them."""
        self._without_gradient = [name for name, parameter in parameters if parameter.grad is None]

    @contextmanager
    def explained(self, step: int) -> Iterator[None]:
        """Around forward or backward: adds to an error, which ends the job, what only the trainer knows."""
        try:
            yield
        except RuntimeError as error:
            rank = self._here.rank
            if "Expected to have finished reduction" in str(error) and self._without_gradient:
                error.add_note(f"rank {rank}: no gradient in the step before for {', '.join(self._without_gradient)}.")
            elif is_out_of_memory(error):
                error.add_note(
                    f"rank {rank} ran out of memory in step {step}. The other ranks are in that step already, so one rank "
                    "cannot try it again alone: the job ends, and goes on from its last checkpoint when started again."
                )
            raise
