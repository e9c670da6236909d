"""`ddpkit smoke`: runs `ddpkit.rank.smoke`, the minimal communication test; after a failure it says where to look next."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ddpkit.diagnosis.run import HEALTHY, UNKNOWN

from .launcher import launch
from .options import checked_options, decided_backend, usable_gpus
from .train_command import RANKS_WITHOUT_GPU

if TYPE_CHECKING:
    from ddpkit.run import Run

PROGRAM = "ddpkit.rank.smoke"
STEPS = ("variables", "versions", "init", "device", "all-reduce", "barrier and destroy")
# A rank waits this long for the others and then says which ones are missing; the job gets a little longer.
WAIT_S, LIMIT_S = 60, 90
# The variables that torchrun sets; without them the test runs in one process.
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def smoke(
    nproc: Annotated[
        str | None,
        typer.Option("--nproc-per-node", "--nproc_per_node", "-n", help="Ranks; by default one for each GPU, or 2."),
    ] = None,
    backend: Annotated[str | None, typer.Option(help="gloo or nccl; by default what the machine allows.")] = None,
    single: Annotated[bool, typer.Option("--single", help="One plain process, for comparison.")] = False,
    share_gpu: Annotated[
        bool, typer.Option("--share-gpu", help="Let NCCL ranks share a GPU; needs at least 2 ranks.")
    ] = False,
) -> None:
    """Test communication in six steps, without any training code: variables, versions, init, device, all-reduce, barrier.

    By default one rank for each GPU, or 2 on the CPU. Exit code: 0 passed, 1 failed, 2 not started.
    """
    if single:
        raise typer.Exit(_alone(backend))
    gpus = len(usable_gpus(os.environ))
    ranks = nproc or max(gpus, 1 if gpus and not share_gpu else RANKS_WITHOUT_GPU)
    waits = ["--timeout", str(WAIT_S)]
    run = launch(PROGRAM, args=waits, nproc=ranks, backend=backend, timeout=LIMIT_S, share_gpu=share_gpu)
    if not run.ok:
        print("\n".join(f"smoke: {line}" for line in advice(run)))
    raise typer.Exit(0 if run.ok else 1)


def _alone(backend: str | None) -> int:
    """Run the test as one plain process, and return the exit code."""
    words = ["--backend", decided_backend(checked_options(nproc=1, backend=backend), os.environ)] if backend else []
    env = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
    if subprocess.run([sys.executable, "-m", PROGRAM, *words], env=env).returncode == 0:
        return 0
    print("smoke: a single process fails too, so communication is not the cause; next: ddpkit doctor")
    return 1


def advice(run: Run) -> list[str]:
    """Which step failed on which rank, what that step depends on, and what to do next."""
    failed = []
    for rank in run.ranks:
        told = re.search(r"^\[(\d)/6\] failed on rank \d+: .*?^\[\1/6\] (.*?)$", rank.stderr, re.MULTILINE | re.DOTALL)
        if told:
            failed.append((int(told[1]), rank.rank, told[2]))
    if failed:
        # The first step that failed anywhere; what came later may follow from it.
        step, _, matter = min(failed)
        ranks = sorted(str(rank) for at, rank, _ in failed if at == step)
        whose = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        lines = [f"step {step} of 6 ({STEPS[step - 1]}) failed on {whose}. {matter}"]
    else:
        reached = [int(n) for rank in run.ranks for n in re.findall(r"^\[(\d)/6\] ", rank.stdout, re.MULTILINE)]
        last = max(reached, default=0)
        done = f"the last step that finished is {last} of 6 ({STEPS[last - 1]})" if last else "no step finished"
        lines = [f"{done}; no rank could say what failed."]
    if run.diagnosis is not None and run.diagnosis.name not in (HEALTHY, UNKNOWN):
        lines.append(f"next: ddpkit explain {run.diagnosis.name}")
    return [
        *lines,
        "next: ddpkit doctor checks this machine; ddpkit smoke --single runs the test without communication.",
    ]
