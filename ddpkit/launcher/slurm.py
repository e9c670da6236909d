"""What a job asks of Slurm, and the file for `sbatch` that starts one torchrun on each of its nodes."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpkit.errors import LaunchError

# The word of a node's command that stands for torchrun's rendezvous options, which only the job's own nodes can know.
RENDEZVOUS = "{rendezvous}"
# Options of sbatch that the batch file sets itself, or that would make it another kind of job.
_OWN = {"nodes": "nodes=", "N": "nodes=", "partition": "partition=", "p": "partition=", "account": "account="}
_OWN |= {"A": "account=", "time": "time_limit=", "t": "time_limit="}
_REFUSED = "array a wrap ntasks n ntasks-per-node output o error e job-name J requeue parsable wait W test-only".split()
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_BEGIN = """\
# This file runs on the job's first node. That node hosts the rendezvous, on a port that is free there now.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$({python} -c 'import socket; print(socket.create_server(("", 0)).getsockname()[1])')
export head port

# One torchrun on each node. If one fails, the others end by themselves and say why.\
"""
_RENDEZVOUS = """\\
  --nnodes {nodes} --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" \\
  --rdzv-endpoint "$head:$port" --rdzv-conf "is_host=$((SLURM_NODEID == 0))" \\
 \
"""
# srun does not take --cpus-per-task from the file by itself.
_SRUN = "exec srun --kill-on-bad-exit=0 --no-kill --wait=0 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}"


@dataclass(frozen=True)
class SlurmOptions:
    """What a job asks of Slurm, for `launch(..., slurm=SlurmOptions(nodes=2))`.

    Args:
        nodes: machines, each with one torchrun; `nproc` ranks on each.
        partition: the partition to wait in; None means Slurm's default.
        time_limit: as with `sbatch --time`, such as "30" (minutes) or "2:00:00"; None means the partition's default.
        account: the account to charge; None means your default.
        sbatch: further options of sbatch, one string each, such as ["--gres=gpu:4", "--exclusive"].

    Raises:
        LaunchError: a value is wrong.
    """

    nodes: int = 2
    partition: str | None = None
    time_limit: str | None = None
    account: str | None = None
    sbatch: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.nodes, bool) or not isinstance(self.nodes, int) or self.nodes < 1:
            raise LaunchError(f"launch: nodes={self.nodes!r} is not a number of machines; give 1 or more.")
        for name in ("partition", "account"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not re.fullmatch(r"[^\s,]+", value)):
                raise LaunchError(
                    f"launch: {name}={value!r} is not a name; give one word, or None for Slurm's default."
                )
        limit = self.time_limit
        if limit is not None and (not isinstance(limit, str) or not _TIME.fullmatch(limit)):
            raise LaunchError(
                f'launch: time_limit={limit!r} is not a time that sbatch knows; give minutes, such as "30", or "2:00:00".'
            )
        if isinstance(self.sbatch, str):
            raise LaunchError(f"launch: sbatch={self.sbatch!r} is one string; give a list, such as [{self.sbatch!r}].")
        for option in self.sbatch:
            _check_option(option)


def _check_option(option: object) -> None:
    if not isinstance(option, str) or not re.fullmatch(r"--[a-z][a-z-]*(=[^\r\n]*)?|-[A-Za-z]\S*", option):
        advice = 'give each option and its value as one string, such as "--gres=gpu:4".'
        raise LaunchError(f"launch: {option!r} in sbatch= is not an option; {advice}")
    name = re.split(r"[=\s]", option[2:])[0] if option.startswith("--") else option[1]
    if name in _OWN:
        raise LaunchError(f"launch: {option!r} in sbatch= has an argument of its own; use {_OWN[name]}.")
    if name in _REFUSED:
        raise LaunchError(
            f"launch: {option!r} in sbatch= is set by ddpkit, which starts one torchrun a node; leave it out."
        )


def batch_file(
    options: SlurmOptions,
    name: str,
    command: Sequence[str],
    output: str,
    environment: Mapping[str, str] | None = None,
    before: str = "",
) -> str:
    """The text of a file for sbatch, which runs `command` once on each node.

    The word RENDEZVOUS in `command` becomes torchrun's options. `output` is a pattern of sbatch, such as "%j.out".
    `environment` has the same values on all nodes. The lines of `before` run on the first node before all else.
    """
    asked = [f"--job-name={'_'.join(name.split())}", f"--nodes={options.nodes}", "--ntasks-per-node=1"]
    named = {"partition": options.partition, "time": options.time_limit, "account": options.account}
    asked += [f"--{option}={value}" for option, value in named.items() if value]
    asked += [f"--output={output}", "--no-requeue", "--no-kill", *options.sbatch]
    rendezvous = _RENDEZVOUS.format(nodes=options.nodes)
    words = [rendezvous if word == RENDEZVOUS else shlex.quote(word) for word in command]
    on_node = f"\nexec {' '.join(words)}"
    settings = [f"export {key}={shlex.quote(value)}" for key, value in (environment or {}).items()]
    directives = "\n".join(f"#SBATCH {shlex.quote(option)}" for option in asked)
    begin = _BEGIN.format(python=shlex.quote(sys.executable))
    lines = ["#!/bin/bash", directives, "", *settings, *filter(None, [before]), begin]
    return "\n".join([*lines, f"{_SRUN} bash -c {shlex.quote(on_node)}", ""])
