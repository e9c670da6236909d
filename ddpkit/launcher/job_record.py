"""What the run folder says of a job before it starts: what was asked for, its command, the versions."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from .options import Options, Sharing
from .target import Target

_ASKED = ("nnodes", "env", "backend", "torchrun", "max_restarts", "share_gpu", "warm", "expect_replicas")


def described(
    target: Target, options: Options, command: Sequence[str], env: Mapping[str, str], backend: str, shared: Sharing
) -> dict[str, Any]:
    """The record of a job that starts `target` by `command` in `env`."""
    changed = {k: v for k, v in env.items() if os.environ.get(k) != v}
    settings = "".join(f"{k}={shlex.quote(v)} " for k, v in changed.items())
    gpus = shared.gpus or options.world_size
    cwd = options.cwd or os.getcwd()
    hosts = f"{len(options.nodes)} agents · " if len(options.nodes) > 1 else ""
    if options.slurm:
        hosts = f"{options.slurm.nodes} hosts of Slurm · "
    devices = "CPU" if backend == "gloo" else f"{gpus} GPU" + "s" * (gpus > 1) + ", shared" * bool(shared.gpus)
    return {
        "name": options.name or target.name,
        "nproc": options.nproc,
        "world_size": options.world_size,
        "backend": backend,
        "device_words": f"{hosts}{backend} on {devices}",
        "command": f"cd {shlex.quote(cwd)} && " + _for_each(options.nodes, f"{settings}{shlex.join(command)}"),
        "torchrun": list(command),
        "cwd": cwd,
        "env": changed,
        # What was asked for, in the words of `launch`: the bench asks for the same again.
        "asked": {"args": list(target.args)} | {name: getattr(options, name) for name in _ASKED},
        "path_folder": target.path_folder or os.path.dirname(target.command[0]),
        "timeout_s": options.timeout_s,
        "stall_s": options.stall_s,
        "stop_on_stall": options.stop_on_stall,
        "expect_replicas": options.expect_replicas,
        "notes": [*target.notes, *filter(None, [shared.note])],
        "script": next(iter(target.files), ""),
        "versions": {
            "python": sys.version.split()[0],
            "torch": metadata.version("torch"),
            "ddpkit": metadata.version("ddpkit"),
        },
        "started_ns": time.time_ns(),
        "launched_by": os.getpid(),
    }


def _for_each(nodes: Sequence[str], command: str) -> str:
    """A shell line that starts `command` once for each host, side by side."""
    if len(nodes) == 1:
        return command
    return f"(for node in {' '.join(map(str, range(len(nodes))))}; do {command} & done; wait)"
