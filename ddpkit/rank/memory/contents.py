"""Finds what fills a rank's memory: parameters, gradients, optimizer state, DDP's buckets."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ddpkit.runfolder import wire

from .limits import MIB


class Contents:
    """The modules and optimizers of this process, without keeping them alive."""

    def __init__(self) -> None:
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._modules: weakref.WeakSet[Any] = weakref.WeakSet()

    def look_around(self) -> None:
        """Find the modules and optimizers that exist now."""
        for each in gc.get_objects():
            # The type itself: `isinstance` would ask a proxy for its `__class__`.
            if issubclass(type(each), torch.nn.Module):
                self._modules.add(each)
            elif issubclass(type(each), torch.optim.Optimizer):
                self.optimizers.add(each)

    def parts_mib(self) -> dict[str, float]:
        """The MiB of each of `wire.MEMORY_PARTS`, each piece of memory once. Activations are not among them."""
        seen: set[int] = set()
        own, state = [], []
        for module in self._modules:
            own += [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        for optimizer in self.optimizers:
            own += [p for group in optimizer.param_groups for p in group["params"]]
            state += [leaf for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, torch.Tensor)]
        gradients = [p.grad for p in own if p.grad is not None]
        buckets = sum(_bucket_bytes(m) for m in self._modules if isinstance(m, DistributedDataParallel))
        sizes = (_bytes(own, seen), _bytes(gradients, seen), _bytes(state, seen), buckets)
        return {part: size / MIB for part, size in zip(wire.MEMORY_PARTS, sizes, strict=True)}


def _bytes(tensors: Iterable[Any], seen: set[int]) -> int:
    """Bytes of `tensors` on this rank; those at the addresses in `seen` are counted already."""
    total = 0
    for tensor in tensors:
        part = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor
        # A tensor without values, or without memory, has no address.
        if (address := part.data_ptr()) and address not in seen:
            seen.add(address)
            total += part.numel() * part.element_size()
    return total


def _bucket_bytes(module: DistributedDataParallel) -> int:
    """DDP's buckets: a copy of every gradient, unless the gradients are views of them."""
    if module.gradient_as_bucket_view:
        return 0
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
