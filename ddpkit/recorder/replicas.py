"""Writes down this rank's DDP models when its process group or its script ends.

`runfolder/replicas.py` compares them between ranks, so no collective is needed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections import deque
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ddpkit.runfolder import wire

from . import failure

# Of a larger model only every n-th value is kept.
MOST_VALUES = 200_000
MOST_MODELS = 4


@dataclass
class Followed:
    """A DDP model: weak references to it and to its module, its ranks, and its values when it was freed."""

    ddp: weakref.ref[Any]
    module: weakref.ref[Any]
    ranks: list[int]
    ignored: set[str]
    last: tuple[dict[str, Any], bytes] | None = None


_followed: deque[Followed] = deque(maxlen=MOST_MODELS)


def follow_models(module: ModuleType) -> None:
    """Follow every DDP model from here on; `module` is `torch.nn.parallel.distributed`."""
    ddp = module.DistributedDataParallel
    init = ddp.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        with contextlib.suppress(Exception):
            _follow(self)

    ddp.__init__ = __init__


def _follow(model: Any) -> None:
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(model.process_group)
    followed = Followed(weakref.ref(model), weakref.ref(model.module), ranks, set(model.parameters_to_ignore))
    # Called when a function returns, say: the wrapped module is still there then, unless it is part of a cycle.
    weakref.finalize(model, _keep, followed).atexit = False
    _followed.append(followed)


def _keep(followed: Followed) -> None:
    """Keep the values of a model that is being freed; a GPU is not asked, it may have failed."""
    module = followed.module()
    with contextlib.suppress(Exception):
        if module is not None and not _has_failed() and all(p.device.type == "cpu" for p in module.parameters()):
            followed.last = _values(module, followed)


def note() -> None:
    """Write the models down as they are now; not after a failure, when a GPU may never answer."""
    folder = failure.own_folder()
    if folder is None or not _followed or _has_failed() or os.environ.get(wire.ENV_REPLICAS) == "0":
        return
    with contextlib.suppress(Exception):
        described = []
        with open(folder / wire.REPLICA_VALUES, "wb") as file:
            for followed in _followed:
                module = followed.module() if followed.ddp() is not None else None
                found = followed.last if module is None else _values(module, followed)
                if found:
                    described.append(found[0])
                    file.write(found[1])
        if described:
            wire.write_record(folder / wire.REPLICAS, {"models": described})


def note_at_the_end() -> None:
    """Call `note` if the process group still exists; otherwise that was done when it was destroyed."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        note()


def _has_failed() -> bool:
    """Whether an exception is passing through; `sys.exit` counts only while another one is handled."""
    error = sys.exc_info()[1]
    return error is not None and not (isinstance(error, SystemExit) and error.__context__ is None)


def stride_for(values: int) -> int:
    """Keep every n-th of so many values; an odd n does not stay in the same columns of a matrix."""
    stride = max(1, -(-values // MOST_VALUES))
    return stride if stride % 2 else stride + 1


def _values(module: Any, followed: Followed) -> tuple[dict[str, Any], bytes]:
    """The parameters and buffers that DDP keeps equal: their description, and their values as float32."""
    import torch

    named = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name not in followed.ignored and not hasattr(tensor, "to_local"):
            named[name] = tensor
    stride = stride_for(sum(tensor.numel() for tensor in named.values()))
    lengths, values = [], bytearray()
    for tensor in named.values():
        part = tensor.detach().flatten()[::stride].to("cpu", torch.float32).contiguous()
        values += part.numpy().tobytes()
        lengths.append(part.numel())
    buffers = [name for name, _ in module.named_buffers() if name in named]
    described = {"ranks": followed.ranks, "names": list(named), "lengths": lengths, "buffers": buffers}
    return described, bytes(values)
