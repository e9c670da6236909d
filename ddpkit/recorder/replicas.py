"""Writes down the parameters of this rank's DDP models as its process group goes, or its script ends.

The notebook's side, `runfolder/replicas.py`, compares them between ranks: no collective is made for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ddpkit.runfolder import wire

from . import failure

# Of larger models every so-many-th value is kept, of all models together.
MOST_VALUES = 200_000

_models: list[weakref.ref[Any]] = []


def follow_models(module: ModuleType) -> None:
    """Have each DDP model remembered from here on; `module` is `torch.nn.parallel.distributed`."""
    ddp = module.DistributedDataParallel
    init = ddp.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _models.append(weakref.ref(self))

    ddp.__init__ = __init__


def note() -> None:
    """Write the models down as they are now; nothing after a failure, when a GPU may never answer."""
    folder = failure.own_folder()
    models = [model for model in (known() for known in _models) if model is not None]
    if folder is None or not models or _has_failed() or os.environ.get(wire.ENV_REPLICAS) == "0":
        return
    with contextlib.suppress(Exception):
        tensors = [_tensors_of(model) for model in models]
        values = sum(tensor.numel() for named in tensors for tensor in named.values())
        stride = max(1, -(-values // MOST_VALUES))
        # An odd stride does not stay within the same columns of a matrix.
        stride += stride % 2 == 0
        with open(folder / wire.REPLICA_VALUES, "wb") as file:
            described = [_write(file, model, named, stride) for model, named in zip(models, tensors, strict=True)]
        wire.write_record(folder / wire.REPLICAS, {"models": described})


def note_at_the_end() -> None:
    """As `note`, where the process group is still there; one that is gone was noted as it went."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        note()


def _has_failed() -> bool:
    """Whether an exception passes through; `sys.exit` is none, unless it comes of one."""
    error = sys.exc_info()[1]
    return error is not None and not (isinstance(error, SystemExit) and error.__context__ is None)


def _tensors_of(model: Any) -> dict[str, Any]:
    """What DDP keeps equal: parameters, then buffers, by the names of the wrapped module."""
    ignored = set(model.parameters_to_ignore)
    found = {}
    for name, tensor in (*model.module.named_parameters(), *model.module.named_buffers()):
        if name not in ignored and not hasattr(tensor, "to_local"):
            found[name] = tensor
    return found


def _write(file: Any, model: Any, named: Mapping[str, Any], stride: int) -> dict[str, Any]:
    """Append the values of one model to `file`, as float32, and say what they are."""
    import torch
    import torch.distributed as dist

    lengths = []
    for tensor in named.values():
        part = tensor.detach().flatten()[::stride].to("cpu", torch.float32).contiguous()
        part.numpy().tofile(file)
        lengths.append(part.numel())
    buffers = [name for name, _ in model.module.named_buffers() if name in named]
    ranks = dist.get_process_group_ranks(model.process_group)
    return {"ranks": ranks, "names": list(named), "lengths": lengths, "buffers": buffers}
