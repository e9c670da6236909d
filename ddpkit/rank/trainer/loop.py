"""`Trainer`: a training loop under DDP or FSDP2 that says what goes wrong, and continues after a restart.

A step has DDP's own collectives and no others, and never waits for the device. The files beside this one are its parts.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from ddpkit.rank.guarding import guard
from ddpkit.rank.guarding.deadline import Deadline
from ddpkit.rank.joining.process_group import Here
from ddpkit.rank.loading.loader import SafeLoader, safe_loader
from ddpkit.rank.loading.plan import default_workers
from ddpkit.rank.memory.monitor import MemoryMonitor
from ddpkit.rank.saving.randomness import seed_everything
from ddpkit.settings.training import TrainConfig

from . import example
from .evaluation import evaluate, moved, samples
from .optimization import Optimization
from .parallel import spread
from .profiling import Profile
from .progress import Progress
from .recovery import Recovery
from .saves import Saves

logger = logging.getLogger("ddpkit.rank")


@dataclass(frozen=True)
class Outcome:
    """How a training run ended. `loss`: mean over all ranks in the last interval; `evaluation`: over the evaluation data."""

    steps: int
    epochs: int
    loss: float
    evaluation: float | None
    skipped: int
    resumed_from: int
    ended_by: str


class Trainer:
    """Trains `model` on this rank, together with the others: `with setup() as here: Trainer(config, here).train()`.

    Without a model, loss and dataset it trains the small transformer of `example.py` on synthetic data. Batches are pairs
    (inputs, targets), and the loss is `loss(model(inputs), targets)`; for anything else override `compute_loss`.

    Args:
        config: all options.
        here: what `setup()` gave.
        model: any module, the same on every rank (DDP sends rank 0's first weights, FSDP2 does not).
        loss: from outputs and targets to the mean loss of a batch, a scalar tensor.
        dataset: map-style; each rank trains on its own part.
        evaluation: map-style; every sample is evaluated once, after each epoch.
        optimizer: makes one from the parameters; by default AdamW. If it is not fused, each step waits for the device.
    """

    def __init__(
        self,
        config: TrainConfig,
        here: Here,
        model: torch.nn.Module | None = None,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        dataset: Any = None,
        evaluation: Any = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    ) -> None:
        self.config, self.here = config, here
        seed_everything(config.seed)
        if dataset is None:
            dataset, evaluation = example.datasets(config)
        self.spread = spread(example.SmallTransformer(config) if model is None else model, config, here)
        self.loss = loss or example.language_model_loss
        self.dataset = dataset
        self.loader = self._loader()
        self.evaluation = evaluation
        self.optimization = Optimization(
            config, self.spread, here.device, optimizer(self.spread.bare.parameters()) if optimizer else None
        )
        self.saves = Saves(config, here, self.spread, self.optimization)
        self.step, self.epoch = 0, 0
        self._resumed_from: int | None = None
        self.mean_loss = float("nan")
        self.score: float | None = None
        self._parameters = [(name, p) for name, p in self.spread.bare.named_parameters() if p.requires_grad]
        self.recovery = Recovery(config, here, self.optimization)
        # From here on each rank has its own dropout.
        seed_everything(config.seed + 1 + here.rank)

    def train(
        self, num_steps: int | None = None, warmup_steps: int | None = None, profile: bool | None = None
    ) -> Outcome:
        """Train to the end that `config` sets, or to optimizer step `num_steps`; every rank calls this.

        `warmup_steps` and `profile` replace those of `config`.

        Raises:
            TooManyErrors, UnevenData, ReplicasDiffer, CheckpointError: on every rank.
            WorkerDied, or what the model raises: on the rank where it happens; the job then ends at once.
        """
        if warmup_steps is not None:
            self.optimization.warm_up(warmup_steps)
        steps_per_epoch = math.ceil(len(self.loader) / self.config.gradient_accumulation_steps)
        self._end = num_steps or self.config.max_steps or self.config.num_epochs * steps_per_epoch
        self._ended_by = ""
        if self._resumed_from is None:
            self._resumed_from = self._resume()
        with ExitStack() as around:
            limit_mib, every = 1024 * self.config.max_memory_gb, self.config.memory_check_interval
            self.memory = around.enter_context(MemoryMonitor(limit_mib, every, device=self.here.device))
            self.deadline = around.enter_context(Deadline(self.config.step_deadline_s or None, self.here))
            enabled = self.config.profile if profile is None else profile
            self.profile = around.enter_context(Profile(self.spread.model, enabled, self.config.log_dir, self.here))
            self.progress = Progress(self.here, self._end, self.step, self.loader.num_workers)
            around.callback(self.progress.close)
            while not self._is_done():
                self._train_epoch()
            self._save()
        return Outcome(
            self.step,
            self.epoch,
            self.mean_loss,
            self.score,
            int(self.optimization.skipped),
            self._resumed_from,
            self._ended_by,
        )

    def _train_epoch(self) -> None:
        """Train on the rest of the data's epoch, or to the end of the training."""
        self.recovery.begin_epoch()
        for window, data_s in self._windows():
            self._train_step(window, data_s)
            self.deadline.rest()
            if self.step % self.config.log_interval == 0:
                self._exchange()
            if self._is_done():
                break
            if self.config.checkpoint_interval and self.step % self.config.checkpoint_interval == 0:
                self._save()
        # Batch 0: the loader has come to the next epoch.
        if self.loader.state_dict()["batch"] in (0, len(self.loader)):
            self._finish_epoch()

    def _windows(self) -> Iterator[tuple[list[Any], float]]:
        """The micro-batches of each step, and the seconds it took to load them; the last window may be shorter."""
        batches = iter(self.loader)
        while True:
            self.deadline.at("data", self.step)
            since = time.perf_counter()
            window = []
            for batch in batches:
                window.append(batch)
                if len(window) == self.config.gradient_accumulation_steps:
                    break
            if not window:
                return
            yield window, time.perf_counter() - since

    def _train_step(self, window: list[Any], data_s: float) -> None:
        """One optimizer step on the micro-batches of `window`; only the last backward communicates."""
        sizes = [samples(batch) for batch in window]
        total = torch.zeros((), device=self.here.device)
        forward_s = 0.0
        for i, batch in enumerate(window):
            with self.spread.synchronised(i == len(window) - 1):
                self.deadline.at("forward", self.step)
                since = time.perf_counter()
                loss = self.forward(batch) * (sizes[i] / sum(sizes))
                forward_s += time.perf_counter() - since
                self.deadline.at("backward", self.step)
                self.backward(loss)
            total += loss.detach()
        self.recovery.look_at(self._parameters)
        self.deadline.at("optimizer", self.step)
        self.optimization.apply()
        self.step += 1
        self.progress.step(total, data_s, forward_s)
        self.memory.step()
        self.profile.step()

    def compute_loss(self, batch: Any) -> torch.Tensor:
        """The mean loss of one batch, a scalar, on this rank's device."""
        inputs, targets = batch
        return self.loss(self.spread.model(inputs), targets)

    def forward(self, batch: Any) -> torch.Tensor:
        """The loss of `batch`, in the precision of `config`."""
        with self.recovery.explained(self.step), self.optimization.autocast():
            return self.compute_loss(moved(batch, self.here.device))

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss` to the parameters' gradients."""
        with self.recovery.explained(self.step):
            self.optimization.backward(loss)

    def _exchange(self) -> None:
        """Exchange the ranks' figures; all ranks decide the same from them."""
        interval = self.progress.exchange(self.loader.num_workers)
        if not interval.steps:
            return
        self.mean_loss = interval.loss
        self.progress.say(self.step, self.epoch, interval)
        self.recovery.bound(self.epoch, interval.not_finite)
        if self.config.cleanup_interval and self.step % self.config.cleanup_interval < self.config.log_interval:
            gc.collect()
        if interval.loss <= self.config.target_loss:
            self._ended_by = f"target loss {self.config.target_loss:g} reached"

    def _finish_epoch(self) -> None:
        self._exchange()
        self.spread.share_buffers()
        if self.config.check_replicas:
            guard.check_replicas(self.spread.bare)
        if self.evaluation is not None:
            self.score = evaluate(self.spread.model, self.forward, self.evaluation, self.config.batch_size, self.here)
            logger.info("epoch %d is done: evaluation loss %.4f", self.epoch, self.score)
        self.epoch += 1
        self.loader.epoch = self.epoch
        if self.epoch % self.config.save_interval == 0:
            self._save()

    def _save(self) -> None:
        told = {"epoch": self.epoch, "loss": self.mean_loss, "score": self.score}
        self.saves.save(self.step, told, {"loader": self.loader.state_dict()})

    def _resume(self) -> int:
        """Go on from the newest whole checkpoint, if there is one; returns the steps that are done."""
        found = self.saves.newest()
        if found is None:
            return 0
        # DDP lays out its buckets anew after the first backward, and with more than two ranks their order decides in which
        # order gradients are added, down to the last bit. So one backward comes before the state is loaded.
        self.backward(self.forward(next(iter(self.loader))))
        self.optimization.optimizer.zero_grad(set_to_none=True)
        told, own = self.saves.load(found)
        self.loader.load_state_dict(own["loader"])
        self.step, self.epoch = found.step, told["epoch"]
        self.mean_loss, self.score = told["loss"], told["score"]
        return found.step

    def _is_done(self) -> bool:
        if self.step >= self._end:
            self._ended_by = self._ended_by or f"{self._end} steps"
        return bool(self._ended_by)

    def _loader(self) -> SafeLoader:
        config = self.config
        # No more than this rank's share of the cores: the default, and the core that the default leaves to the rank.
        share = 1 + default_workers(self.here.local_world_size)
        return safe_loader(
            self.dataset,
            config.batch_size,
            here=self.here,
            seed=config.seed,
            num_workers=None if config.num_workers is None else min(config.num_workers, share),
            timeout_s=config.loader_timeout_s or None,
            retries=config.loader_retries,
            pin_memory=None if config.pin_memory else False,
        )
