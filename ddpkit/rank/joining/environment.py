"""Reads what torchrun told this rank through the environment, and says in a sentence what is wrong with it.

torch is imported only by the functions that describe it: a rank can say who it is without a torch that works.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ddpkit.runfolder import wire

TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Ranks cannot meet without these four; the local ones have defaults.
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ENV_TIMEOUT = "TORCH_DIST_TIMEOUT"
TORCHRUN_SETS_IT = "torchrun sets it: remove the line that sets it again, or start the script with torchrun"

_IMPORTED_AT = time.time()


@dataclass(frozen=True)
class Place:
    """This process in its job, as the environment says. `alone`: it is not a rank, so it is a job of one.

    `local_world_size` is None if it is not set. The ranks meet at `host` and `port`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int | None = None
    host: str = ""
    port: int = 0
    alone: bool = True


def place() -> Place:
    """Read and check torchrun's variables."""
    env = os.environ
    if not env.get("RANK") and not env.get("WORLD_SIZE"):
        return Place(local_rank=_integer("LOCAL_RANK", "0"))
    if missing := [name for name in NEEDED if not env.get(name)]:
        there = ", ".join(f"{name}={env[name]}" for name in NEEDED if env.get(name))
        raise ValueError(
            f"setup: {missing[0]} is not set, though {there} {'is' if len(missing) == 3 else 'are'}. Was the script "
            f"started without torchrun? It sets {', '.join(NEEDED)}; whoever starts ranks otherwise must set all four."
        )
    rank, world_size, local_rank = _integer("RANK"), _integer("WORLD_SIZE"), _integer("LOCAL_RANK", "0")
    local_world_size = _integer("LOCAL_WORLD_SIZE") if env.get("LOCAL_WORLD_SIZE") else None
    _check_range("RANK", rank, "WORLD_SIZE", world_size)
    if local_world_size is not None:
        _check_range("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
    port = _integer("MASTER_PORT")
    if not 0 < port < 65536:
        raise ValueError(f"setup: MASTER_PORT={port} is no port; ports go from 1 to 65535. {TORCHRUN_SETS_IT}.")
    return Place(rank, world_size, local_rank, local_world_size, env["MASTER_ADDR"], port, alone=False)


def rank() -> int:
    """The rank in the environment; 0 if there is none, or no number: `place` complains of that."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else 0


def shares_gpu() -> bool:
    """Whether `launch(share_gpu=True)` has found fewer GPUs than ranks."""
    return os.environ.get(wire.ENV_SHARE_GPU) == "1"


def _integer(name: str, default: str = "") -> int:
    """The variable as a number; `default` if it is not set."""
    text = os.environ.get(name) or default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f'setup: {name}="{text}" is not an integer. {TORCHRUN_SETS_IT}.') from None


def _check_range(name: str, value: int, size_name: str, size: int) -> None:
    if not 0 <= value < size:
        last = f"so the last is {size - 1}" if size > 0 else "and there must be one at least"
        raise ValueError(
            f"setup: {name}={value}, but {size_name}={size}: ranks count from 0, {last}. {TORCHRUN_SETS_IT}."
        )


def timeout_s(asked: float | None) -> float | None:
    """Seconds after which a collective fails: `asked`, else $TORCH_DIST_TIMEOUT, else None for torch's own default."""
    text = os.environ.get(ENV_TIMEOUT)
    if asked is None and not text:
        return None
    name = f"{ENV_TIMEOUT}=" if asked is None else "timeout_s="
    try:
        seconds = float(text or "" if asked is None else asked)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise ValueError(f"setup: {name}{asked if asked is not None else text} is no number of seconds above 0.")
    return seconds


def described(here: Place) -> str:
    """The variables, for a log: `RANK=0, WORLD_SIZE=2, ...`."""
    if here.alone:
        return "no rank's variables are set: a job of one process"
    said = ", ".join(f"{name}={os.environ[name]}" for name in TOLD if name in os.environ)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return said if attempt == "0" else f"{said}, restart {attempt}"


def versions() -> str:
    """`Python 3.11.7, torch 2.13.0+cpu, CUDA not built in, NCCL not built in`."""
    import torch

    built = torch.version.cuda or getattr(torch.version, "hip", None)
    return (
        f"Python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {built or 'not built in'}, "
        f"NCCL {nccl_version() or 'not built in'}"
    )


def nccl_version() -> str:
    """The NCCL that torch was built with; "" if none."""
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def devices() -> str:
    """`no GPU is visible`, or how many GPUs and CPU cores there are."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        return "no GPU is visible"
    available = "" if torch.cuda.is_available() else ", but CUDA cannot be used"
    return f"{count} GPU{'s' if count > 1 else ''} visible{available}, {os.cpu_count()} CPU cores"


def settings() -> str:
    """The variables of NCCL, gloo and CUDA that are set: the first thing to check when a group does not come up."""
    steer = ("NCCL_", "GLOO_", "CUDA_", "TORCH_NCCL_", "TORCH_DIST")
    said = ", ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(steer))
    return said or "none is set"


def started_at() -> float:
    """When this process was started or forked, in seconds of the wall clock; outside Linux, when it was first here."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return _IMPORTED_AT
