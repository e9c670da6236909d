"""`ddpkit train`: checks the whole configuration, then launches `ddpkit.rank.training`; other commands are in `cli.py`."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from ddpkit.errors import LaunchError
from ddpkit.machine import devices
from ddpkit.runfolder import wire
from ddpkit.settings.training import ConfigError, TrainConfig
from ddpkit.settings.words import explained

from . import options
from .launcher import launch
from .options import EXIT_CODES, checked_options, decided_backend, usable_gpus

PROGRAM = "ddpkit.rank.training"
RANKS_WITHOUT_GPU = 2
# A training run of a few seconds. A configuration file does not make it larger; options given with --test do.
TEST = (
    "--num-epochs 2 --dataset-size 256 --batch-size 8 --seq-len 16 --vocab-size 64 --hidden-size 32 --num-layers 2 "
    "--num-heads 2 --warmup-steps 5 --learning-rate 0.01 --num-workers 1 --checkpoint-interval 10 --resume never"
).split()
DEBUG = {"CUDA_LAUNCH_BLOCKING": "1", "TORCH_DISTRIBUTED_DEBUG": "INFO"}
# The parameters of `train` are this command's options; any other option belongs to the configuration.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}


@dataclass(frozen=True)
class Place:
    """Where the ranks run: how many, the GPUs they may use, whether --cpu was given, and the environment."""

    nproc: int
    gpus: tuple[devices.Gpu, ...]
    cpu: bool
    env: dict[str, str]

    def words(self, backend: str) -> str:
        """The device that the ranks train on with `backend`, and why."""
        if backend == "nccl":
            return f"nccl on GPU {', '.join(str(gpu.index) for gpu in self.gpus[: self.nproc])}"
        if self.cpu or not self.gpus:
            return f"gloo on the CPU ({'--cpu' if self.cpu else 'no GPU to use'})"
        return f"gloo on the CPU, although {len(self.gpus)} GPUs are visible: nccl needs one for each rank"


def train(
    context: typer.Context,
    gpus: Annotated[
        str | None, typer.Option("--gpus", "-g", help="GPUs to use, as nvidia-smi numbers them: 0,1. By default all.")
    ] = None,
    batch_size: Annotated[str | None, typer.Option("--batch-size", "-b", help="Samples on each rank.")] = None,
    epochs: Annotated[str | None, typer.Option("--epochs", "-e", help="Passes over the data.")] = None,
    log_dir: Annotated[str | None, typer.Option("--log-dir", "-l", help="Folder of the ranks' log files.")] = None,
    checkpoint_dir: Annotated[
        str | None, typer.Option("--checkpoint-dir", "-c", help="Folder of the checkpoints.")
    ] = None,
    config: Annotated[str | None, typer.Option("--config", help="A YAML file; options override it.")] = None,
    nproc: Annotated[
        str | None,
        typer.Option("--nproc-per-node", "--nproc_per_node", "-n", help="Ranks; by default one for each GPU, or 2."),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU, with gloo.")] = False,
    test: Annotated[bool, typer.Option("--test", help="Train a tiny model for 2 epochs, in seconds.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Log more, and make CUDA calls synchronous.")] = False,
    resume: Annotated[
        bool | None, typer.Option(help="Resume from the newest checkpoint (the default), or not.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", "--max_restarts", help="How often torchrun restarts the ranks.")
    ] = 0,
    keys: Annotated[bool, typer.Option("--keys", help="List every key of the configuration, then exit.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print the command, but start nothing.")
    ] = False,
) -> None:
    """Train the example model on this machine's GPUs, one rank each; without a GPU, on the CPU with 2 ranks.

    Every key of the configuration is also an option (--hidden-size 256); --keys lists them. All are checked before a rank starts.

    Exit code: 0 passed, 1 failed, 124 hung, 130 stopped, 2 not started.
    """
    if keys:
        print(explained(TrainConfig.keys()))
        return
    given = {"config": config, "batch-size": batch_size, "num-epochs": epochs, "log-dir": log_dir}
    given |= {"checkpoint-dir": checkpoint_dir, "resume": {True: "auto", False: "never", None: None}[resume]}
    words = ["--log-level=DEBUG"] if debug else []
    words += [f"--{name}={value}" for name, value in given.items() if value is not None]
    own = [option for parameter in context.command.params for option in parameter.opts]
    place = _place(gpus, nproc, cpu, debug)
    with TemporaryDirectory(prefix="ddpkit-train-") if test else contextlib.nullcontext() as folder:
        first = [*TEST, f"--log-dir={folder}/logs", f"--checkpoint-dir={folder}/checkpoints"] if test else []
        try:
            checked = _checked([*first, *words, *context.args], place, own)
        except ConfigError as error:
            print(error, file=sys.stderr)
            raise typer.Exit(2) from None
        raise typer.Exit(_trained(*checked, place, max_restarts, dry_run))


def _place(gpus: str | None, nproc: str | None, cpu: bool, debug: bool) -> Place:
    if cpu and gpus:
        raise LaunchError(f"train: --cpu and --gpus {gpus} cannot be combined; leave one of them out.")
    env = dict(DEBUG) if debug else {}
    visible = [] if cpu else usable_gpus(os.environ)
    if gpus:
        visible = _chosen(gpus, visible)
        # CUDA numbers the fastest GPU first; nvidia-smi numbers by PCI bus order.
        env |= {"CUDA_VISIBLE_DEVICES": ",".join(str(g.index) for g in visible), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    ranks = checked_options(nproc=nproc or len(visible) or RANKS_WITHOUT_GPU).nproc
    return Place(ranks, tuple(visible), cpu, env)


def _chosen(asked: str, visible: list[devices.Gpu]) -> list[devices.Gpu]:
    """The GPUs that --gpus names.

    Raises:
        LaunchError: a GPU does not exist, or is named twice.
    """
    known = {str(gpu.index): gpu for gpu in visible}
    wanted = [word.strip() for word in asked.split(",")]
    if absent := [word for word in wanted if word not in known]:
        found = f"the GPUs visible here are {', '.join(known)}" if known else "no GPU is visible here"
        found = found if options.torch_has_cuda() else "this torch was built without CUDA"
        names = ", ".join(absent)
        raise LaunchError(f"train: --gpus {asked} asks for {names}, but {found}; name others, or use --cpu.")
    if len(set(wanted)) < len(wanted):
        raise LaunchError(f"train: --gpus {asked} names a GPU twice; each rank needs one of its own.")
    return [known[word] for word in wanted]


def _checked(words: Sequence[str], place: Place, own: Sequence[str]) -> tuple[TrainConfig, str]:
    """The configuration, and the backend of the job.

    Raises:
        ConfigError: lists everything that is wrong.
        LaunchError: there are too few GPUs for the backend.
    """
    known = "" if place.gpus else "cpu"
    config = TrainConfig.from_args(words, world_size=place.nproc, device_type=known, others=own)
    asked = checked_options(nproc=place.nproc, backend="gloo" if place.cpu else config.backend)
    backend = decided_backend(asked, {**os.environ, **place.env})
    if faults := config.errors(place.nproc, device_of(backend)):
        raise ConfigError(faults)
    return config, backend


def device_of(backend: str) -> str:
    """The device that ranks with `backend` train on."""
    return "cuda" if backend == "nccl" else "cpu"


def _trained(config: TrainConfig, backend: str, place: Place, max_restarts: int, dry_run: bool) -> int:
    """Print what will run, start it, and return the exit code."""
    ranks = f"{place.nproc} rank{'s' * (place.nproc > 1)}, {place.words(backend)}"
    each, total = config.batch_size * config.gradient_accumulation_steps, config.global_batch(place.nproc)
    print(f"train: {ranks}; {each} samples a step on each, {total} in all.")
    if dry_run:
        print(_command(config, backend, place, max_restarts))
        return 0
    run = launch(
        PROGRAM,
        args=config.to_args(),
        nproc=place.nproc,
        backend=backend,
        env=place.env,
        max_restarts=max_restarts,
        name="train",
    )
    return EXIT_CODES.get(run.state, 1)


def _command(config: TrainConfig, backend: str, place: Place, max_restarts: int) -> str:
    """The plain torchrun command that starts the same job in a terminal."""
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", str(place.nproc)]
    torchrun += ["--max-restarts", str(max_restarts)] if max_restarts else []
    settings = [f"{name}={value}" for name, value in place.env.items()]
    return shlex.join([f"{wire.ENV_BACKEND}={backend}", *settings, *torchrun, "-m", PROGRAM, *config.to_args()])
