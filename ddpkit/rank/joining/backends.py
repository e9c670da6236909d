"""Decides on gloo or NCCL from facts that are equal on all ranks, and what else these facts tell; `rollcall.py` brings them.

A rank that decided by itself would leave the others waiting in another backend.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from . import environment
from .environment import Place
from .rollcall import Facts

BACKENDS = ("gloo", "nccl")
SLOW = "slower, for debugging only"


@dataclass(frozen=True)
class Choice:
    """The backend for all ranks, and why. `fell_back`: why it is not the one that was asked for, "" where it is."""

    backend: str
    why: str
    fell_back: str = ""


def own_facts(here: Place, asked: str | None, fallback: bool) -> Facts:
    """What this rank can say of itself. A GPU is only looked at where NCCL may come of it."""
    import torch

    no_nccl = "" if asked == "gloo" else _no_nccl(here)
    has_own = not no_nccl and asked in (None, "nccl") and not environment.shares_gpu()
    return Facts(
        rank=here.rank,
        world_size=here.world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        backend=asked,
        fallback=fallback,
        no_nccl=no_nccl,
        gpu=_gpu_name(here.local_rank) if has_own else "",
        torch=torch.__version__,
        nccl=environment.nccl_version(),
    )


def check_asked(asked: str | None) -> None:
    """Refuse a backend that nobody knows.

    Raises:
        ValueError: it is neither gloo, nccl nor one that was registered with torch.
    """
    import torch.distributed as dist

    # The program's own backends; those of torch's list that need hardware of their own are not for this kit.
    others = [name.lower() for name in dist.Backend._plugins if name.lower() != "fake"]
    if asked is not None and asked not in (*BACKENDS, *others):
        raise ValueError(f'setup: backend "{asked}" is not one of {", ".join([*BACKENDS, *others])}.')


def decide(roll: Sequence[Facts]) -> Choice:
    """The backend that all ranks take: what was asked for, else NCCL where every rank has a GPU of its own, else gloo.

    Raises:
        ValueError: the ranks ask for different backends, or NCCL is asked for, cannot be, and not all ranks may fall back.
    """
    if len({facts.backend for facts in roll}) > 1:
        all_asked = _by_value(roll, "backend", "none")
        raise ValueError(
            f"setup: the ranks ask for different backends: {all_asked}. All need the same argument or DDP_BACKEND."
        )
    asked, cannot = roll[0].backend, _why_no_nccl(roll)
    if asked is None:
        return Choice("gloo", cannot) if cannot else Choice("nccl", "every rank has a GPU")
    if asked != "nccl" or not cannot:
        return Choice(asked, "asked for")
    if not may_fall_back(roll):
        raise ValueError(
            f'setup: backend "nccl" asked for, but {cannot}; use backend="gloo", as many ranks as GPUs, fallback=True, '
            "or share the GPUs by launch(share_gpu=True)."
        )
    return Choice("gloo", cannot, fell_back=cannot)


def may_fall_back(roll: Sequence[Facts]) -> bool:
    """Whether every rank was told that it may; one that was not would be left behind."""
    return all(facts.fallback for facts in roll)


def differences(roll: Sequence[Facts]) -> list[str]:
    """What differs between ranks and may be why they will not understand each other; one sentence each."""
    return [
        f"setup: the {name} versions differ between ranks: {_by_value(roll, field, 'none')}."
        for name, field in (("torch", "torch"), ("NCCL", "nccl"))
        if len({getattr(facts, field) for facts in roll}) > 1
    ]


def _why_no_nccl(roll: Sequence[Facts]) -> str:
    """Why these ranks cannot use NCCL together, with the rank; "" where they can."""
    if unable := next((facts for facts in roll if facts.no_nccl), None):
        return f"rank {unable.rank} {unable.no_nccl}"
    owner: dict[str, int] = {}
    for facts in roll:
        if facts.gpu and (first := owner.setdefault(facts.gpu, facts.rank)) != facts.rank:
            both = f"ranks {first} and {facts.rank} are on the same GPU, {facts.gpu}"
            return f"{both} (NCCL would say: Duplicate GPU detected)"
    return ""


def _no_nccl(here: Place) -> str:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return "has a torch without NCCL"
    count = torch.cuda.device_count()
    if here.local_rank >= count and not (count and environment.shares_gpu()):
        return f"sees {count} GPU{'' if count == 1 else 's'}, and its LOCAL_RANK is {here.local_rank}"
    return ""


def _gpu_name(index: int) -> str:
    """A name that no other GPU in the world has; "" where this torch does not tell it."""
    import torch

    return str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))


def _by_value(roll: Sequence[Facts], field: str, none: str) -> str:
    """`gloo (rank 0), nccl (ranks 1, 2)`."""
    ranks: dict[str, list[int]] = {}
    for facts in roll:
        ranks.setdefault(getattr(facts, field) or none, []).append(facts.rank)
    return ", ".join(
        f"{value} (rank{'s' if len(those) > 1 else ''} {', '.join(map(str, those))})" for value, those in ranks.items()
    )
