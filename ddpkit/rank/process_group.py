"""`setup`: brings the process group up with the right backend and device, and takes it down on every path."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

from ddpkit import wire

from . import collectives, failure

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

BACKENDS = ("gloo", "nccl")
# gloo's threads ask for the GIL once more to let go of their last work. Met by an interpreter that is shutting down,
# that aborts the process: in 5 of 40 healthy DDP jobs without this pause, in 0 of 40 with it.
GLOO_LETS_GO_S = 0.05


@dataclass(frozen=True)
class Here:
    """Where this process stands in the job. `rank` counts over all hosts, `local_rank` on this one."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    backend: str
    device: torch.device


class setup:
    """Context manager over the process group: `with setup() as here:`.

    The backend is `backend`, else $DDP_BACKEND (which `launch(backend=...)` sets), else NCCL where every rank of the
    job has a GPU of its own, otherwise gloo; across hosts the ranks agree on it through the store. The device is
    chosen before any collective. `timeout_s`: seconds after which a collective fails; None takes torch's default
    (gloo 30 minutes, NCCL 10). Without torchrun's environment the process is a job of one rank.

    Raises:
        ValueError: the backend is unknown, or NCCL is asked for where a rank has no GPU.
    """

    def __init__(self, backend: str | None = None, timeout_s: float | None = None) -> None:
        asked = backend or os.environ.get(wire.ENV_BACKEND)
        if asked is not None and asked not in BACKENDS:
            raise ValueError(f'setup: backend "{asked}" is not one of {", ".join(BACKENDS)}.')
        self._asked = asked
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)

    def __enter__(self) -> Here:
        import torch
        import torch.distributed as dist

        env = os.environ
        rank, world_size = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
        local_rank, local_world_size = int(env.get("LOCAL_RANK", "0")), int(env.get("LOCAL_WORLD_SIZE", "1"))
        collectives.say_joining({})
        store = self._store(dist)
        backend = self._asked or _agreed_backend(dist, store, rank, world_size, local_world_size)
        if backend == "nccl" and not _has_own_gpu(dist, local_world_size):
            raise ValueError(
                f'setup: backend "nccl" asked for, but rank {rank} finds {torch.cuda.device_count()} GPUs for '
                f'{local_world_size} ranks on this host; use backend="gloo", or as many ranks as GPUs.'
            )
        device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        bound = device if device.type == "cuda" else None
        dist.init_process_group(
            backend, timeout=self._timeout, store=store, rank=rank, world_size=world_size, device_id=bound
        )
        return Here(rank, local_rank, world_size, local_world_size, backend, device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        import torch.distributed as dist

        if error is not None:
            # Before the sockets close: the peers' own failures, a moment later, are consequences of this one.
            failure.note(error)
        if dist.is_initialized():
            backend = dist.get_backend()
            dist.destroy_process_group()
            if backend == "gloo":
                time.sleep(GLOO_LETS_GO_S)

    def _store(self, dist: dist) -> dist.Store:
        if "RANK" not in os.environ:
            return dist.HashStore()
        return next(dist.rendezvous("env://", timeout=self._timeout or timedelta(minutes=30)))[0]


def _has_own_gpu(dist: dist, local_world_size: int) -> bool:
    import torch

    return dist.is_nccl_available() and torch.cuda.device_count() >= local_world_size


def _agreed_backend(dist: dist, store: dist.Store, rank: int, world_size: int, local_world_size: int) -> str:
    """NCCL if every rank can; a rank that chose alone would leave the others waiting."""
    able = _has_own_gpu(dist, local_world_size)
    if world_size > local_world_size:
        asked = dist.PrefixStore("ddpkit/nccl", store)
        asked.set(str(rank), str(int(able)))
        able = all(asked.get(str(r)) == b"1" for r in range(world_size))
    return "nccl" if able else "gloo"
