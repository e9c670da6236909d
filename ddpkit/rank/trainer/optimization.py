"""The optimizer step: AdamW, warm-up, clipping, mixed precision. A step whose gradients are not finite is skipped.

After backward every rank holds the same averaged gradients, so all ranks find the same norm without a collective. The
optimizer's own kernel skips the step, so the host does not wait for the answer.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from ddpkit.settings.training import TrainConfig

from .parallel import Replicated, Sharded

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Optimization:
    """The optimizer with its schedule and scaler. `skipped` counts, on the device, the steps that were not applied."""

    def __init__(
        self, config: TrainConfig, spread: Replicated | Sharded, device: torch.device, optimizer: Any = None
    ) -> None:
        self._spread, self._config = spread, config
        self.optimizer: torch.optim.Optimizer = optimizer or _adamw(spread.bare, config)
        self._precision = _precision(config, device)
        self._device = device
        # The same scale on all ranks: it follows the averaged gradients.
        self.scaler = torch.amp.GradScaler(device.type) if self._precision == "fp16" else None
        self.warm_up(config.warmup_steps)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._skips_by_itself = getattr(self.optimizer, "_step_supports_amp_scaling", False)

    def warm_up(self, steps: int) -> None:
        """Let the learning rate grow linearly over the first `steps` steps, if the configuration says so."""
        linear = self._config.scheduler == "linear_warmup" and steps > 0
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / steps) if linear else 1.0
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the forward pass."""
        dtype = DTYPES.get(self._precision)
        return torch.autocast(self._device.type, dtype=dtype, enabled=dtype is not None)

    def backward(self, loss: torch.Tensor) -> None:
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def apply(self) -> None:
        """One optimizer step; none if the gradients are not finite."""
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        spoilt = ~torch.isfinite(self._spread.clip(self._config.max_grad_norm or float("inf")))
        self.skipped += spoilt
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self._skips_by_itself:
            self.optimizer.found_inf = spoilt.float()
            self.optimizer.step()
        elif not spoilt.item():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs besides the optimizer's own state."""
        return {
            "schedule_state": self.schedule.state_dict(),
            "scaler_state": self.scaler.state_dict() if self.scaler else None,
            "skipped": int(self.skipped),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state["schedule_state"])
        if self.scaler and state["scaler_state"]:
            self.scaler.load_state_dict(state["scaler_state"])
        self.skipped.fill_(state["skipped"])


def _precision(config: TrainConfig, device: torch.device) -> str:
    """ "fp32", "bf16" or "fp16", as `config` asks; "auto" is bf16 or fp16 on a GPU and fp32 on the CPU."""
    if not config.use_amp:
        return "fp32"
    if config.precision != "auto":
        return config.precision
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported() else "fp16"


def _adamw(model: torch.nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW in its fused form, which can skip a step without a wait."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)
