"""Chooses gloo or NCCL from the facts of all ranks (`rollcall.py`), so that every rank chooses the same.

A rank that chose alone would leave the others waiting in another backend.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from . import environment
from .environment import Place
from .rollcall import Facts
from .words import by_value, in_words

BACKENDS = ("gloo", "nccl")
SLOW = "slower, for debugging only"


@dataclass(frozen=True)
class Choice:
    """The backend of all ranks, and why. `fell_back`: why it is not the one asked for, "" if it is."""

    backend: str
    why: str
    fell_back: str = ""


def own_facts(here: Place, asked: str | None, fallback: bool) -> Facts:
    """This rank's facts. The GPU is looked at only where NCCL is possible."""
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
        # Older torches do not tell it.
        gpu=str(getattr(torch.cuda.get_device_properties(here.local_rank), "uuid", "")) if has_own else "",
        torch=torch.__version__,
        nccl=environment.nccl_version(),
    )


def check_asked(asked: str | None) -> None:
    """Refuse a backend that is neither gloo, nccl nor one that the program registered with torch."""
    others = [name.lower() for name in dist.Backend._plugins if name.lower() != "fake"]
    if asked is not None and asked not in (*BACKENDS, *others):
        raise ValueError(f'setup: backend "{asked}" is not one of {", ".join([*BACKENDS, *others])}.')


def decide(roll: Sequence[Facts]) -> Choice:
    """The backend of all ranks: the one asked for, else NCCL if every rank has its own GPU, else gloo."""
    if len({facts.backend for facts in roll}) > 1:
        all_asked = _each(roll, "backend")
        raise ValueError(
            f"setup: the ranks ask for different backends: {all_asked}. All need the same argument or DDP_BACKEND."
        )
    asked, cannot = roll[0].backend, _why_no_nccl(roll)
    if asked is None:
        return Choice("gloo", cannot) if cannot else Choice("nccl", "every rank has a GPU")
    if asked != "nccl" or not cannot:
        return Choice(asked, "asked for")
    if not all(facts.fallback for facts in roll):
        raise ValueError(
            f'setup: backend "nccl" asked for, but {cannot}; use backend="gloo", as many ranks as GPUs, fallback=True, '
            "or share the GPUs by launch(share_gpu=True)."
        )
    return Choice("gloo", cannot, fell_back=cannot)


def differences(roll: Sequence[Facts]) -> list[str]:
    """A sentence for each version that differs between ranks: they may not understand each other."""
    return [
        f"setup: the {name} versions differ between ranks: {_each(roll, field)}."
        for name, field in (("torch", "torch"), ("NCCL", "nccl"))
        if len({getattr(facts, field) for facts in roll}) > 1
    ]


def _why_no_nccl(roll: Sequence[Facts]) -> str:
    """Why these ranks cannot use NCCL together; "" if they can."""
    if unable := next((facts for facts in roll if facts.no_nccl), None):
        return f"rank {unable.rank} {unable.no_nccl}"
    owner: dict[str, int] = {}
    for facts in roll:
        if facts.gpu and (first := owner.setdefault(facts.gpu, facts.rank)) != facts.rank:
            both = f"ranks {first} and {facts.rank} are on the same GPU, {facts.gpu}"
            return f"{both} (NCCL would say: Duplicate GPU detected)"
    return ""


def _no_nccl(here: Place) -> str:
    """Why this rank cannot use NCCL; "" if it can."""
    if not dist.is_nccl_available():
        return "has a torch without NCCL"
    count = torch.cuda.device_count()
    if here.local_rank >= count and not (count and environment.shares_gpu()):
        return f"sees {count} GPU{'' if count == 1 else 's'}, and its LOCAL_RANK is {here.local_rank}"
    return ""


def _each(roll: Sequence[Facts], field: str) -> str:
    """`gloo (rank 0), nccl (ranks 1, 2)`."""
    found = by_value([getattr(facts, field) or "none" for facts in roll])
    return ", ".join(f"{value} ({in_words(ranks)})" for value, ranks in found.items())
