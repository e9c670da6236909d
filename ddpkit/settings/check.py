"""Checks settings: each key by itself, then keys that depend on each other; all faults at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from .keys import Values

# Keys that FSDP has no use for.
OF_DDP = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters")


@dataclass(frozen=True)
class Job:
    """The job that a configuration is for; `device_type` is "cpu", "cuda", or "" while it is not known."""

    world_size: int
    device_type: str


Rule = Callable[[Values, Job], Iterator[str]]


def faults(config: Values, world_size: int, device_type: str, leave_out: Collection[str] = frozenset()) -> list[str]:
    """A sentence for each thing that is wrong. Keys in `leave_out`, and rules that need them, are not checked."""
    alone = {name: key.fault(getattr(config, name)) for name, key in config.keys().items() if name not in leave_out}
    found = [sentence for sentence in alone.values() if sentence]
    if world_size < 1:
        found.append(f"a job has at least one rank (world_size={world_size!r} given)")
        world_size = 1
    unusable = {name for name, sentence in alone.items() if sentence} | set(leave_out)
    for names, rule in TOGETHER:
        if not unusable & set(names):
            found += rule(config, Job(world_size, device_type))
    return found


def _heads(config: Values, job: Job) -> Iterator[str]:
    if config.hidden_size % config.num_heads:
        yield (
            "model.hidden_size must be divisible by model.num_heads "
            f"({config.hidden_size} and {config.num_heads} given)"
        )


def _held_out(config: Values, job: Job) -> Iterator[str]:
    if config.eval_fraction and not config.eval_size:
        yield (
            f"data.eval_fraction {config.eval_fraction:g} of {config.dataset_size} samples is not one sample; "
            "raise it, or 0 for no evaluation"
        )


def _batches(config: Values, job: Job) -> Iterator[str]:
    """Every rank needs a whole batch, and an epoch needs a whole accumulation window."""
    batches = config.train_size // job.world_size // config.batch_size
    ranks = f"{job.world_size} rank{'s' * (job.world_size > 1)}"
    if not batches:
        yield (
            f"training.batch_size {config.batch_size} on {ranks} takes {config.batch_size * job.world_size} samples for one "
            f"step, but of data.dataset_size {config.dataset_size} there are {config.train_size} to train on "
            f"({config.eval_size} are held out)"
        )
    elif batches < config.gradient_accumulation_steps:
        yield (
            f"training.gradient_accumulation_steps {config.gradient_accumulation_steps} is more than the {batches} "
            f"micro-batches that an epoch has on {ranks}; lower it, or batch_size"
        )


def _amp(config: Values, job: Job) -> Iterator[str]:
    if not config.use_amp and config.precision in ("bf16", "fp16"):
        yield (
            f"training.precision {config.precision} is mixed precision, and training.use_amp is false; "
            "take use_amp true, or precision auto"
        )


def _backend(config: Values, job: Job) -> Iterator[str]:
    if config.backend == "nccl" and job.device_type == "cpu":
        yield "distributed.backend nccl needs a GPU for each rank, and these ranks run on the CPU; take gloo, or none"


def _nccl_or_not(config: Values, job: Job) -> Iterator[str]:
    if config.fallback and config.backend == "gloo":
        yield "distributed.fallback goes from nccl to gloo, and distributed.backend is gloo already; leave one of them out"


def _graph(config: Values, job: Job) -> Iterator[str]:
    if config.static_graph and config.find_unused_parameters:
        yield (
            "distributed.static_graph and distributed.find_unused_parameters exclude each other: a graph that never "
            "changes is searched once; keep one"
        )


def _windows(config: Values, job: Job) -> Iterator[str]:
    if config.static_graph and config.gradient_accumulation_steps > 1:
        yield (
            "distributed.static_graph and training.gradient_accumulation_steps exclude each other: DDP learns the graph in "
            "its first backward, and fails there under no_sync (expect_autograd_hooks_ INTERNAL ASSERT FAILED); leave out one"
        )


def _shards(config: Values, job: Job) -> Iterator[str]:
    changed = [name for name in OF_DDP if getattr(config, name) != config.keys()[name].default]
    if config.parallel == "fsdp" and changed:
        names = " and ".join(f"distributed.{name}" for name in changed)
        yield f"{names} belong{'s' * (len(changed) == 1)} to ddp, and distributed.parallel is fsdp; leave out one or the other"


def _fault(config: Values, job: Job) -> Iterator[str]:
    if config.fault is None:
        return
    if not (found := re.fullmatch(r"[a-z]+:(\d+):\d+", config.fault)):
        yield f"run.fault must be KIND:RANK:STEP, such as kill:1:7 ({config.fault!r} given)"
    elif job.device_type and int(found[1]) >= job.world_size:
        yield f"run.fault {config.fault} is for rank {found[1]}, and the last rank is {job.world_size - 1}"


# Each rule with the keys that it reads.
TOGETHER: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("hidden_size", "num_heads"), _heads),
    (("dataset_size", "eval_fraction"), _held_out),
    (("dataset_size", "eval_fraction", "batch_size", "gradient_accumulation_steps"), _batches),
    (("use_amp", "precision"), _amp),
    (("backend",), _backend),
    (("backend", "fallback"), _nccl_or_not),
    (("static_graph", "find_unused_parameters"), _graph),
    (("static_graph", "gradient_accumulation_steps"), _windows),
    (("parallel", *OF_DDP), _shards),
    (("fault",), _fault),
)
