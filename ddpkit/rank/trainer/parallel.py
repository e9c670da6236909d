"""Spreads a model over the ranks, as DDP's replicas or FSDP2's shards with the same methods, for `loop.py`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpkit.rank.joining.process_group import Here
from ddpkit.settings.training import TrainConfig


class _Spread:
    """What both have: `model` is what a step calls, `bare` is the user's module."""

    bare: torch.nn.Module
    model: torch.nn.Module

    def share_buffers(self) -> None:
        """Give every rank the buffers of rank 0: without DDP's forward, each rank has its own batch statistics."""
        for buffer in self.bare.buffers() if dist.is_initialized() else ():
            dist.broadcast(buffer, src=0)

    def clip(self, most: float) -> torch.Tensor:
        """Scale the gradients to a norm of at most `most`; returns the norm before, on the device."""
        norm: Any = torch.nn.utils.clip_grad_norm_(self.bare.parameters(), most)
        # The norm of shards takes one collective.
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


class Replicated(_Spread):
    """DDP: every rank holds the whole model, and gradients are averaged during backward. In one process, the model itself."""

    sharded = False

    def __init__(self, model: torch.nn.Module, config: TrainConfig, here: Here) -> None:
        self.bare = self.model = model.to(here.device)
        if here.world_size > 1:
            self.model = DistributedDataParallel(
                self.bare,
                device_ids=[here.device] if here.device.type == "cuda" else None,
                bucket_cap_mb=config.bucket_cap_mb,
                gradient_as_bucket_view=config.gradient_as_bucket_view,
                static_graph=config.static_graph,
                find_unused_parameters=config.find_unused_parameters,
            )

    def synchronised(self, now: bool) -> AbstractContextManager[None]:
        """Inside, forward and backward average the gradients with the other ranks if `now`; otherwise they only add up."""
        wait = not now and isinstance(self.model, DistributedDataParallel)
        return self.model.no_sync() if wait else nullcontext()

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Model and optimizer, without DDP's prefix."""
        return {"model_state": self.bare.state_dict(), "optimizer_state": optimizer.state_dict()}

    def load(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        self.bare.load_state_dict(state["model_state"])
        optimizer.load_state_dict(state["optimizer_state"])


class Sharded(_Spread):
    """FSDP2: each rank holds a part of every parameter, gradient and optimizer state. Needs torch 2.6.

    Each of `model.blocks` (or of its children) is gathered alone. FSDP2 does not equal the first weights: the trainer
    seeds all ranks alike before the model is made.
    """

    sharded = True

    def __init__(self, model: torch.nn.Module, config: TrainConfig, here: Here) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(here.device.type, (here.world_size,))
        self.bare = self.model = model.to(here.device)
        for block in getattr(model, "blocks", model.children()):
            if any(p.requires_grad for p in block.parameters()):
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def synchronised(self, now: bool) -> AbstractContextManager[None]:
        """As DDP's; until `now`, each rank adds up whole gradients."""
        self.model.set_requires_gradient_sync(now)
        return nullcontext()

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Model and optimizer, as `torch.distributed.checkpoint` takes them."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model_state, optimizer_state = get_state_dict(self.model, optimizer)
        return {"model_state": model_state, "optimizer_state": optimizer_state}

    def load(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(
            self.model, optimizer, model_state_dict=state["model_state"], optim_state_dict=state["optimizer_state"]
        )


def spread(model: torch.nn.Module, config: TrainConfig, here: Here) -> Replicated | Sharded:
    """`model` on this rank's device, replicated or sharded as `config.parallel` says."""
    return Sharded(model, config, here) if config.parallel == "fsdp" else Replicated(model, config, here)
