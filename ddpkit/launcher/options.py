"""Checks the options of a job before anything starts, and chooses the backend."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from ddpkit.errors import LaunchError
from ddpkit.machine import devices
from ddpkit.runfolder import wire

from .slurm import SlurmOptions
from .slurm_queue import refuse_impossible

BACKENDS = ("gloo", "nccl")
# The commands' exit codes by how the job ended; 1 for everything else.
EXIT_CODES = {"passed": 0, "stopped": 130, "timed_out": 124, "hung": 124}

# NCCL refuses two ranks on one GPU of one host. `rank/joining/process_group.py` sets a different NCCL_HOSTID on each rank,
# so NCCL treats the ranks as separate hosts, and then everything must go over sockets.
_BY_SOCKETS = (
    "NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 "
    "NCCL_NVLS_ENABLE=0 NCCL_MNNVL_ENABLE=0 NCCL_CUMEM_ENABLE=0 NCCL_RAS_ENABLE=0"
)
SHARED_GPU = dict(setting.split("=") for setting in _BY_SOCKETS.split())


@dataclass(frozen=True)
class Options:
    """The options of `launch` after checking, under the same names; `cwd` is the bench's, by default the current folder."""

    nproc: int
    nnodes: int | str
    timeout_s: float | None
    stall_s: float | None
    max_restarts: int
    torchrun: tuple[str, ...]
    env: Mapping[str, str | None] = field(default_factory=dict)
    backend: str | None = None
    stop_on_stall: bool = False
    name: str | None = None
    reveal: bool = True
    warm: bool = True
    share_gpu: bool = False
    expect_replicas: bool = True
    cwd: str | None = None
    slurm: SlurmOptions | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the hosts that the agents stand for; one without a name if there is one agent."""
        most = int(str(self.nnodes).rpartition(":")[2])
        return tuple(f"node{number}" for number in range(most)) if most > 1 else ("",)

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.nproc * (self.slurm.nodes if self.slurm else len(self.nodes))

    @property
    def elastic(self) -> bool:
        """Whether the job may go on with fewer agents."""
        return ":" in str(self.nnodes)


def checked_options(
    nproc: Any = 2,
    nnodes: Any = 1,
    timeout: Any = None,
    stall: Any = 10.0,
    max_restarts: Any = 0,
    torchrun: Any = (),
    **others: Any,
) -> Options:
    """The options of `launch`, each checked; `others` need no check.

    Raises:
        LaunchError: an option has a wrong value.
    """
    if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
        raise LaunchError(f"launch: max_restarts={max_restarts!r} is not a count; give 0 or more.")
    if isinstance(torchrun, str):
        raise LaunchError(f"launch: torchrun={torchrun!r} is one string; give a list, such as {torchrun.split()!r}.")
    limits = _seconds("timeout", timeout), _seconds("stall", stall)
    _check_nodes(nnodes, torchrun)
    if others.get("slurm") is not None:
        _check_slurm(nproc, nnodes, torchrun, **others)
        return Options(nproc, nnodes, *limits, max_restarts, tuple(torchrun), **others)
    options = Options(_ranks_asked_for(nproc), nnodes, *limits, max_restarts, tuple(torchrun), **others)
    if options.world_size > (most := devices.most_ranks()):
        each = f"{options.nproc} ranks for each of {len(options.nodes)} agents"
        raise LaunchError(f"launch: {each} asked for on {os.cpu_count()} cores; ask for {most} ranks at most.")
    return options


def _ranks_asked_for(nproc: Any) -> int:
    number: Any = nproc
    if isinstance(nproc, str):
        gpus, cores = len(devices.visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))), os.cpu_count() or 1
        if nproc == "gpu" and not gpus:
            raise LaunchError('launch: nproc="gpu" asked for, but no GPU is visible; use a number, or "cpu".')
        named = {"cpu": cores, "gpu": gpus, "auto": gpus or cores}
        number = int(nproc) if nproc.isdigit() else named.get(nproc)
    if isinstance(number, bool) or not isinstance(number, int):
        raise LaunchError(f'launch: nproc={nproc!r} is not a number of ranks; use 1 or more, "cpu", "gpu" or "auto".')
    most = devices.most_ranks()
    if number < 1:
        raise LaunchError(f"launch: nproc={number} asked for; a job has at least one rank.")
    if number > most:
        raise LaunchError(f"launch: {number} ranks asked for on {os.cpu_count()} cores; ask for {most} at most.")
    return number


def _check_slurm(nproc: Any, nnodes: Any, torchrun: Sequence[str], slurm: Any, **others: Any) -> None:
    """Refuse what cannot be had on Slurm's hosts, of which this one knows nothing."""
    if not isinstance(slurm, SlurmOptions):
        advice = "give ddpkit.SlurmOptions(nodes=2, ...)"
        raise LaunchError(f"launch: slurm={slurm!r} is a {type(slurm).__name__}; {advice}.")
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise LaunchError(f"launch: nproc={nproc!r} asked for on Slurm's hosts; give a number of ranks for each host.")
    if nnodes != 1:
        raise LaunchError(f"launch: nnodes={nnodes!r} asked for with slurm=; use SlurmOptions(nodes={nnodes!r}).")
    if others.get("share_gpu"):
        raise LaunchError("launch: share_gpu=True asked for with slurm=; it is for several ranks on this machine.")
    if name := first_of(torchrun, "--standalone", "--nnodes", "--node-rank", "--rdzv", "--master"):
        raise LaunchError(f"launch: torchrun's {name} asked for with slurm=, which sets it; leave it out.")
    refuse_impossible(slurm)


def _check_nodes(nnodes: Any, torchrun: Sequence[str]) -> None:
    """Refuse a number of agents that is none, and options of torchrun that contradict it."""
    found = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", str(nnodes)) if isinstance(nnodes, int | str) else None
    if found is None or isinstance(nnodes, bool) or int(found[2] or found[1]) < int(found[1]):
        raise LaunchError(f'launch: nnodes={nnodes!r} is not a number of agents; give 1 or more, or "1:2".')
    if str(nnodes) == "1":
        return
    if name := first_of(torchrun, "--standalone", "--nnodes"):
        raise LaunchError(f"launch: nnodes={nnodes!r} and torchrun's {name} asked for; leave {name} out.")
    endpoint = value_of(torchrun, "rdzv-endpoint")
    host = endpoint.rpartition(":")[0] or endpoint
    try:
        socket.getaddrinfo(host or "localhost", None)
    except OSError as error:
        raise LaunchError(
            f"launch: the host {host} of --rdzv-endpoint cannot be resolved ({error.strerror}); give a name that every "
            "host knows, or an address."
        ) from None


def first_of(torchrun: Sequence[str], *beginnings: str) -> str:
    """The first of torchrun's options whose name begins so; "" if none does."""
    return next((option.partition("=")[0] for option in torchrun if option.startswith(beginnings)), "")


def value_of(torchrun: Sequence[str], name: str, default: str = "") -> str:
    """The value of torchrun's option `name`, in any of its spellings; `default` if it is not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", dest="value", default=default)
    return str(parser.parse_known_args(list(torchrun))[0].value)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def _seconds(option: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise LaunchError(f"launch: {option}={value!r} is not a time; give seconds above 0, or None for no limit.")
    return float(value)


def decided_backend(options: Options, env: Mapping[str, str]) -> str:
    """NCCL if each rank has its own GPU or may share one, otherwise gloo; decided before any rank starts."""
    asked = options.backend or env.get(wire.ENV_BACKEND)
    if asked is not None and asked not in BACKENDS:
        near = difflib.get_close_matches(asked.lower(), BACKENDS, n=1)
        hint = f'did you mean "{near[0]}"?' if near else "use one of them, or None to have it chosen."
        raise LaunchError(f'launch: backend "{asked}" is not one of {", ".join(BACKENDS)}; {hint}')
    if options.slurm:
        return asked or ("nccl" if any("gpu" in option for option in options.slurm.sbatch) else "gloo")
    gpus = len(usable_gpus(env))
    found = _found(gpus, env)
    if options.share_gpu and asked == "gloo":
        advice = 'Use backend="nccl", or leave share_gpu out.'
        raise LaunchError(f'launch: share_gpu=True asked for with backend "gloo", which needs no GPU. {advice}')
    if options.share_gpu and not gpus:
        raise LaunchError(f'launch: share_gpu=True asked for, but {found}. Use backend="gloo" without it.')
    if options.share_gpu:
        return "nccl"
    if asked == "nccl" and gpus < options.world_size:
        advice = f'nproc={gpus}, backend="gloo", or share_gpu=True' if gpus else 'backend="gloo"'
        raise LaunchError(
            f'launch: {options.world_size} ranks asked for with backend "nccl", but {found}. Use {advice}.'
        )
    return asked or ("nccl" if gpus >= options.world_size else "gloo")


def _found(gpus: int, env: Mapping[str, str]) -> str:
    if not torch_has_cuda():
        return "this torch was built without CUDA"
    visible = env.get("CUDA_VISIBLE_DEVICES")
    said = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
    return f"{gpus} GPU is visible{said}" if gpus == 1 else f"{gpus} GPUs are visible{said}"


@dataclass(frozen=True)
class Sharing:
    """How ranks share GPUs: how many GPUs (0: each rank has its own), the environment variables to add, the run's note."""

    gpus: int
    settings: Mapping[str, str]
    note: str


def sharing(options: Options, env: Mapping[str, str]) -> Sharing:
    """How the ranks of a job share GPUs. Variables that the user has set in `env` keep their values."""
    gpus = len(usable_gpus(env)) if options.share_gpu else 0
    if gpus >= options.world_size or not gpus:
        return Sharing(0, {}, "share_gpu changed nothing: each rank has a GPU of its own." if gpus else "")
    settings = {wire.ENV_SHARE_GPU: "1", **{name: value for name, value in SHARED_GPU.items() if name not in env}}
    shared = f"{options.world_size} ranks share {gpus} GPU{'s' if gpus > 1 else ''}"
    note = f"{shared} by NCCL over sockets: its errors and timeouts are NCCL's own, its speed is not."
    return Sharing(gpus, settings, note)


def usable_gpus(env: Mapping[str, str]) -> list[devices.Gpu]:
    """The GPUs that ranks started in `env` may use; none if torch was built without CUDA."""
    return devices.visible_gpus(env.get("CUDA_VISIBLE_DEVICES")) if torch_has_cuda() else []


def gpus_of_each_agent(options: Options, env: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The variable by which each agent gets GPUs of its own, as on a host of its own; none if there are too few."""
    gpus, found = usable_gpus(env), {}
    enough = len(options.nodes) > 1 and len(gpus) >= options.world_size
    for number, node in enumerate(options.nodes):
        own = gpus[number * options.nproc :][: options.nproc]
        found[node] = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in own)} if enough else {}
    return found


def torch_has_cuda() -> bool:
    """Whether the installed torch can use CUDA, according to its version's local tag, without importing it."""
    try:
        return "+cpu" not in metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise LaunchError(f"launch: torch is not installed for {sys.executable}; pip install torch.") from None
