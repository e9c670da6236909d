"""Writes down parameters and gradients at every optimizer step, if `wire.ENV_STEPS` asks for it.

`runfolder/steps.py` compares them. A script needs no change: torch calls a hook before and after every
`optimizer.step()`, and the first optimizer that steps is followed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from ddpkit.runfolder import wire

from . import failure, replicas, watched_calls

_recorder: Recorder | None = None


class InjectedFault(RuntimeError):
    """The fault that `wire.ENV_FAULT` asked for."""


def arm() -> None:
    """Follow the optimizer's steps from here on, if this job asks for it."""
    if os.environ.get(wire.ENV_STEPS) or os.environ.get(wire.ENV_FAULT):
        watched_calls.meet("torch.optim.optimizer", _follow)


def _follow(module: ModuleType) -> None:
    global _recorder
    folder = failure.own_folder()
    if folder is None:
        return
    _recorder = Recorder(folder)
    module.register_optimizer_step_pre_hook(_recorder.before)
    module.register_optimizer_step_post_hook(_recorder.after)


def finish() -> None:
    """Write down the parameters at the script's end."""
    if _recorder is not None and failure.own_folder() is not None:
        with contextlib.suppress(OSError):
            _recorder.finish()


class Recorder:
    """Follows the first optimizer that steps, and writes its values as float32."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._optimizer: Any = None
        self._parameters: dict[str, Any] = {}
        self._stride = 1
        self._steps = 0
        asked = os.environ.get(wire.ENV_FAULT, "").split(":")
        self._fault_at = int(asked[1]) if asked[0] == os.environ.get("RANK") else -1

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The hook that torch calls before a step, when the gradients are complete."""
        if self._optimizer is None:
            self._begin(optimizer)
        if optimizer is not self._optimizer:
            return
        if self._steps == self._fault_at:
            raise InjectedFault(f"a fault was asked for in step {self._steps} of this rank ({wire.ENV_FAULT})")
        self._append(wire.STEP_VALUES, [p.grad for p in self._parameters.values()])

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The hook that torch calls after a step."""
        if optimizer is not self._optimizer:
            return
        at_ns = time.time_ns()
        self._append(wire.STEP_VALUES, self._parameters.values())
        with open(self._folder / wire.STEP_TIMES, "a", encoding="utf-8") as file:
            file.write(json.dumps({"at_ns": at_ns}) + "\n")
        self._steps += 1

    def finish(self) -> None:
        """Write down the parameters as they are now."""
        if self._optimizer is not None:
            self._append(wire.FINAL_VALUES, self._parameters.values())

    def _begin(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._parameters = named(optimizer)
        self._stride = replicas.stride_for(sum(p.numel() for p in self._parameters.values()))
        parts = {name: kept(p, offset(p), self._stride) for name, p in self._parameters.items()}
        record = {
            "names": list(parts),
            "sizes": [-(-p.numel() // self._stride) for p in self._parameters.values()],
            "lengths": [part.numel() for part in parts.values()],
            "offsets": [-(-offset(p) // self._stride) for p in self._parameters.values()],
        }
        wire.write_record(self._folder / wire.STEPS, record)

    def _append(self, name: str, values: Any) -> None:
        import torch

        with open(self._folder / name, "ab") as file:
            for parameter, value in zip(self._parameters.values(), values, strict=True):
                value = torch.zeros_like(parameter) if value is None else value
                part = kept(value.detach(), offset(parameter), self._stride)
                part.to("cpu", torch.float32).contiguous().numpy().tofile(file)


def named(optimizer: Any) -> dict[str, Any]:
    """The optimizer's parameters by their names in a module; by number if no module has them all."""
    import torch

    mine = [p for group in optimizer.param_groups for p in group["params"]]
    wanted = {id(p) for p in mine}
    found: dict[str, Any] = {}
    for module in gc.get_objects():
        if not issubclass(type(module), torch.nn.Module):
            continue
        named_parameters = dict(module.named_parameters())
        whole = wanted <= {id(p) for p in named_parameters.values()}
        # The model rather than its wrapper, whose names are longer by a prefix.
        if whole and (not found or sum(map(len, named_parameters)) < sum(map(len, found))):
            found = named_parameters
    return found or {str(i): p for i, p in enumerate(mine)}


def kept(value: Any, begin: int, stride: int) -> Any:
    """Every `stride`-th value of a tensor, or those in a shard that starts at `begin`."""
    part = value.to_local() if hasattr(value, "to_local") else value
    return part.flatten()[-begin % stride :: stride]


def offset(parameter: Any) -> int:
    """Where this rank's shard of a parameter begins, in values; 0 if it holds all."""
    if not hasattr(parameter, "to_local"):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, starts = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return int(starts[0]) * (parameter.numel() // parameter.shape[0] if parameter.shape[0] else 0)
