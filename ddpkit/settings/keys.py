"""Every setting of a training run with its default and its meaning, and the numbers that follow from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from .read import Key


def _key(section: str, default: Any, says: str, unit: str = "", **more: Any) -> Any:
    """A field that carries what `Key` needs."""
    return dataclasses.field(default=default, metadata={"section": section, "says": says, "unit": unit, **more})


_model, _training, _data = partial(_key, "model", same=True), partial(_key, "training"), partial(_key, "data")
_every, _memory = partial(_key, "intervals", unit="steps", least=1), partial(_key, "memory", above=0)
_ranks, _run = partial(_key, "distributed"), partial(_key, "run")


@dataclass(frozen=True)
class Values:
    """Every key with its default; times are in seconds, memory in the key's unit."""

    vocab_size: int = _model(10000, "tokens the model knows", least=2)
    hidden_size: int = _model(512, "width of the model; a multiple of num_heads", least=1)
    num_layers: int = _model(6, "transformer blocks", least=1)
    num_heads: int = _model(8, "attention heads in each block", least=1)
    dropout: float = _model(0.1, "share of activations dropped in training", least=0, below=1)

    batch_size: int = _training(32, "samples of one micro-batch, on each rank", same=True, least=1)
    gradient_accumulation_steps: int = _training(1, "micro-batches of one optimizer step", same=True, least=1)
    num_epochs: int = _training(10, "passes over the data", "epochs", least=1)
    max_steps: int | None = _training(None, "end after so many optimizer steps", "steps", least=1)
    learning_rate: float = _training(1e-4, "of AdamW, after the warm-up", same=True, above=0)
    weight_decay: float = _training(0.01, "of AdamW", same=True, least=0)
    scheduler: str = _training(
        "linear_warmup", "how the learning rate goes", same=True, choices=("linear_warmup", "constant")
    )
    warmup_steps: int = _training(1000, "steps until the full learning rate", "steps", same=True, least=0)
    max_grad_norm: float = _training(1.0, "gradients are scaled down to this norm; 0: never", same=True, least=0)
    use_amp: bool = _training(True, "mixed precision where precision allows it", same=True)
    precision: str = _training(
        "auto", "auto: 16 bits on GPUs, fp32 on the CPU", same=True, choices=("auto", "fp32", "bf16", "fp16")
    )
    target_loss: float = _training(0.01, "stop when the loss has come down to it; 0: never", least=0)
    max_errors_per_epoch: int = _training(5, "recoverable errors in an epoch before the job ends", least=0)
    seed: int = _training(0, "of first weights, dropout and the data's order", same=True, least=0, below=2**32)

    dataset_size: int = _data(10000, "samples of the synthetic data", same=True, least=1)
    seq_len: int = _data(128, "tokens in a sample", "tokens", same=True, least=1)
    eval_fraction: float = _data(0.1, "share of the data held out for evaluation; 0: none", same=True, least=0, below=1)
    num_workers: int | None = _data(
        4, "loader processes of a rank, fewer where cores are few; none: by the cores", least=0
    )
    pin_memory: bool = _data(True, "batches in page-locked memory, where there is a GPU")
    loader_timeout_s: float = _data(
        120.0, "a worker that takes longer for a batch counts as dead; 0: no limit", "s", least=0
    )
    loader_retries: int = _data(
        0, "how often in an epoch loading goes on with half the workers after one died", least=0
    )

    log_interval: int = _every(10, "a line of progress every so often")
    save_checkpoints: bool = _key("intervals", True, "save checkpoints")
    checkpoint_interval: int = _every(100, "a checkpoint every so often; 0: by epochs alone", least=0)
    save_interval: int = _every(5, "a checkpoint every so often", unit="epochs")
    keep_checkpoints: int = _key("intervals", 3, "the newest so many checkpoints stay", least=1)
    memory_check_interval: int = _every(50, "a look at the memory every so often")
    cleanup_interval: int = _every(0, "collect garbage every so often; frees nothing that is in use; 0: never", least=0)

    max_memory_gb: float = _memory(16.0, "warn when a rank takes more", "GiB")
    memory_budget_mib: float | None = _memory(None, "the tensors of a rank may take no more", "MiB")

    parallel: str = _ranks("ddp", "replicas (ddp) or shards (fsdp)", choices=("ddp", "fsdp"))
    backend: str | None = _ranks(None, "none: nccl where each rank has a GPU, else gloo", choices=("gloo", "nccl"))
    fallback: bool = _ranks(False, "take gloo where NCCL does not come up, and say so")
    timeout_s: float | None = _ranks(
        None, "a collective that takes longer fails; none: torch's own limit", "s", above=0
    )
    bucket_cap_mb: float = _ranks(25.0, "size of DDP's buckets", "MiB", above=0)
    gradient_as_bucket_view: bool = _ranks(True, "gradients are kept in DDP's buckets: one copy less")
    static_graph: bool = _ranks(False, "promise DDP that every step uses the same parameters")
    find_unused_parameters: bool = _ranks(False, "let DDP look for parameters that a step leaves out")

    log_dir: str = _run("logs", "folder of the log files, one for each rank")
    checkpoint_dir: str = _run("checkpoints", "folder of the checkpoints")
    resume: str = _run("auto", "auto: go on from the newest whole checkpoint", choices=("auto", "never"))
    log_level: str = _run("INFO", "what is logged", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    log_as_json: bool = _run(False, "log JSON lines")
    profile: bool = _run(False, "write a trace of some steps")
    check_replicas: bool = _run(True, "compare the ranks' parameters after every epoch")
    step_deadline_s: float = _run(0.0, "a step that takes longer ends the job, with stacks; 0: no limit", "s", least=0)
    fault: str | None = _run(
        None, "what is to go wrong, to see that the training survives it: kill:1:7 kills rank 1 in step 7"
    )

    @classmethod
    @cache
    def keys(cls) -> Mapping[str, Key]:
        """Every key by its name, in order."""
        found = {}
        for one in dataclasses.fields(cls):
            kind, _, none = str(one.type).partition(" | ")
            found[one.name] = Key(one.name, kind=kind, optional=bool(none), default=one.default, **one.metadata)
        return found

    @property
    def eval_size(self) -> int:
        """Samples held out for evaluation."""
        return round(self.dataset_size * self.eval_fraction)

    @property
    def train_size(self) -> int:
        """Samples to train on, over all ranks."""
        return self.dataset_size - self.eval_size

    def global_batch(self, world_size: int) -> int:
        """Samples of one optimizer step, over all ranks and micro-batches."""
        return self.batch_size * world_size * self.gradient_accumulation_steps

    def total_steps(self, world_size: int) -> int:
        """Optimizer steps of the whole training run; each rank has an even share of the data."""
        batches = math.ceil(self.train_size / world_size / self.batch_size)
        steps = self.num_epochs * math.ceil(batches / self.gradient_accumulation_steps)
        return min(steps, self.max_steps or steps)
