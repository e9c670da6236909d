"""`ddpkit script`: prints a plain file for sbatch, with torchrun and without ddpkit."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ddpkit.errors import LaunchError
from ddpkit.runfolder import wire

from .options import BACKENDS, checked_options
from .slurm import RENDEZVOUS, SlurmOptions, batch_file
from .target import resolve


def path_or_module(target: str, module: bool) -> str:
    """TARGET as `launch` takes it: without -m a name with a dot is a file's, also if it does not end in .py."""
    is_path = not module and "." in target and not target.endswith(".py") and "/" not in target
    return f"./{target}" if is_path else target


def script(
    target: Annotated[str, typer.Argument(help="A script's path, or with -m a module's name.")],
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    nodes: Annotated[int, typer.Option("--nodes", "-N", help="Machines, each with one torchrun.")] = 2,
    nproc: Annotated[
        str, typer.Option("--nproc-per-node", "-n", help="Ranks on each machine: a number, cpu, gpu, auto.")
    ] = "2",
    partition: Annotated[str | None, typer.Option("--partition", "-p", help="Slurm's partition.")] = None,
    time: Annotated[str | None, typer.Option("--time", "-t", help="The time limit: minutes, or 2:00:00.")] = None,
    account: Annotated[str | None, typer.Option("--account", "-A", help="The account to charge.")] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option("--sbatch", help="A further option of sbatch: --sbatch=--gres=gpu:4.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="gloo or nccl, for ddpkit.rank.setup().")] = None,
    max_restarts: Annotated[int, typer.Option(help="How often torchrun restarts the ranks.")] = 0,
    module: Annotated[bool, typer.Option("--module", "-m", help="The target is a module.")] = False,
    name: Annotated[str | None, typer.Option(help="The job's name.")] = None,
) -> None:
    """Print a file for sbatch that runs TARGET on several machines with torchrun, without ddpkit.

    Example: ddpkit script --nodes 2 train.py > train.sbatch, then sbatch train.sbatch.

    Exit code: 0 printed, 2 the request is wrong.
    """
    options = SlurmOptions(nodes, partition, time, account, sbatch or ())
    checked_options(nproc=1, max_restarts=max_restarts)
    # The machine that prints the file may have fewer cores and GPUs than the nodes.
    if nproc not in ("cpu", "gpu", "auto") and not (nproc.isdigit() and int(nproc)):
        raise LaunchError(f'script: {nproc!r} is not a number of ranks; use 1 or more, "cpu", "gpu" or "auto".')
    if backend not in (None, *BACKENDS):
        raise LaunchError(f'script: backend "{backend}" is not one of {", ".join(BACKENDS)}; use one of them.')
    found = resolve(path_or_module(target, module), args or (), {})
    torchrun = [sys.executable, "-m", "torch.distributed.run", RENDEZVOUS, "--nproc-per-node", nproc]
    torchrun += ["--max-restarts", str(max_restarts)] if max_restarts else []
    environment = {wire.ENV_BACKEND: backend} if backend else {}
    job = name or found.name
    print(batch_file(options, job, [*torchrun, *found.command], f"{job}-%j.out", environment), end="")
