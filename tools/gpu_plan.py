"""The steps of the day on a machine with one GPU, the most valuable first: what each runs, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass

# Where the ranks of a recording were. It goes with everything that is shown of it.
ENVIRONMENTS = {
    "": "no rank",
    "one": "one GPU, one rank",
    "plain": "one GPU, two ranks of one host",
    "sockets": "one GPU, ranks posing as hosts of their own over sockets, so a lost peer is reported as a lost host",
    "host": "one GPU, two ranks of one host by NCCL 2.30.7's NCCL_MULTI_RANK_GPU_ENABLE",
    "cpu": "CPU, gloo",
}


@dataclass(frozen=True)
class Step:
    """A step: `words` are the file in tools/gpu_steps/ and its case; `group` names those that run side by side.

    `environment` is a key of ENVIRONMENTS. `tries`: it finds out whether ranks get through a healthy job there at all; where
    they do not, the other steps of that environment are left out.
    """

    name: str
    number: int
    group: str
    title: str
    words: tuple[str, str]
    limit_s: float
    environment: str = ""

    @property
    def tries(self) -> bool:
        return self.name in ("healthy", "host_healthy")


def steps(*rows: tuple[str, int, str, str, str, float, str]) -> tuple[Step, ...]:
    return tuple(
        Step(n, number, group, title, (file, n), limit, env) for n, number, group, file, title, limit, env in rows
    )


# The first call: `gpu_day.py OUT --first`.
FIRST = steps(
    ("versions", 0, "look", "machine", "versions, compute mode, interfaces, /dev/shm", 30, ""),
    ("stack", 0, "look", "machine", "the stack of a rank that hangs", 30, "cpu"),
    ("smoke_one", 1, "smoke", "smoke", "ddpkit smoke, one rank", 40, "one"),
    ("two_by_torchrun", 1, "smoke", "smoke", "two ranks on one GPU by plain torchrun: NCCL's refusal", 40, "plain"),
    ("two_refused", 1, "smoke", "smoke", "the same by ddpkit: refused before", 20, ""),
    ("smoke_shared", 1, "smoke", "smoke", "ddpkit smoke --share-gpu, two ranks", 40, "sockets"),
    ("warm_process", 1, "smoke", "smoke", "the warm process opens no GPU", 40, "one"),
)

# The second call: `gpu_day.py OUT`.
REST = steps(
    ("versions", 0, "look", "machine", "versions, compute mode, interfaces, /dev/shm", 30, ""),
    ("healthy", 2, "look", "failures", "a healthy job of two NCCL ranks on one GPU", 75, "sockets"),
    ("skipped_collective", 2, "hangs", "failures", "a skipped collective, timeout 10 s", 60, "sockets"),
    ("metric_meets_bucket", 2, "hangs", "failures", "sizes that differ: a metric meets a bucket", 60, "sockets"),
    ("own_exception", 2, "hangs", "failures", "an exception on one rank", 60, "sockets"),
    ("peer_lost", 2, "hangs", "failures", "SIGKILL of one rank, from outside", 60, "sockets"),
    ("unused_parameters", 2, "labs", "failures", "unused parameters on every rank", 60, "sockets"),
    ("branch_by_rank", 2, "labs", "failures", "unused parameters on one rank", 60, "sockets"),
    ("early_exit", 2, "labs", "failures", "a rank that ends early with exit code 0", 60, "sockets"),
    ("loader_worker_killed", 2, "labs", "failures", "a loader's worker is killed", 60, "sockets"),
    ("plain_skipped", 2, "plain", "pairs", "plain torchrun: a skipped collective, both ranks' dumps", 60, "sockets"),
    ("plain_killed", 2, "plain", "pairs", "plain torchrun: SIGKILL of one rank", 60, "sockets"),
    ("plain_sizes", 2, "plain", "pairs", "plain torchrun: 4 elements meet 8, 1 million meet 2", 60, "sockets"),
    ("plain_raises", 2, "plain", "pairs", "plain torchrun: one rank raises and stays", 60, "sockets"),
    ("memory_remedies", 3, "memory", "memory", "out of memory under a budget, and each remedy's peak", 80, "one"),
    ("memory_two", 3, "memory", "memory", "out of memory beside another process on the GPU", 50, "sockets"),
    ("memory_snapshot", 3, "memory", "memory", "CUDA's memory snapshot, and expandable segments", 50, "one"),
    ("memory_real", 3, "alone", "memory", "the whole GPU filled", 40, "one"),
    ("train_bf16", 4, "train", "training", "ddpkit train --test in bf16", 50, "one"),
    ("train_fp16", 4, "train", "training", "ddpkit train --test in fp16, with a scaler", 50, "one"),
    ("resume", 4, "train", "training", "a training run that goes on, against one that was never stopped", 70, "one"),
    ("killed", 4, "train", "training", "a rank of a training job is killed, and torchrun starts it again", 70, "sockets"),
    ("trainer_cost", 4, "alone_too", "training", "Trainer beside a bare loop", 60, "one"),
    ("comm", 4, "look_again", "training", "CommProfiler on two ranks", 40, "sockets"),
    ("live_memory", 5, "look_again", "machine", "GPU memory of each rank while it runs", 40, "sockets"),
    ("nccl_debug", 5, "look_again", "machine", "NCCL_DEBUG=INFO of a healthy job", 40, "sockets"),
    ("doctor", 5, "look_again", "machine", "ddpkit doctor", 60, ""),
    ("device_side_assert", 5, "faults", "machine", "a device-side assert", 50, "one"),
    ("cuda_kernel_error", 5, "faults", "machine", "an illegal memory access", 50, "one"),
    ("host_healthy", 2, "one_host", "pairs", "one host, a newer NCCL: a healthy job", 60, "host"),
    ("host_skipped", 2, "one_host_too", "pairs", "one host, a newer NCCL: a skipped collective", 50, "host"),
    ("host_killed", 2, "one_host_too", "pairs", "one host, a newer NCCL: SIGKILL of one rank", 50, "host"),
    ("host_sizes", 2, "one_host_too", "pairs", "one host, a newer NCCL: 4 elements meet 8", 50, "host"),
    ("gpu_tests", 6, "tests", "tests", "the tests that need a GPU", 90, ""),
    ("core_labs", 6, "tests", "tests", "the labs of the core path, as they are and cured", 90, "sockets"),
    ("four_ranks", 2, "late", "pairs", "four ranks on one GPU: healthy, then a skipped collective", 90, "sockets"),
    ("desync_debug", 2, "late", "pairs", "a skipped collective with TORCH_NCCL_DESYNC_DEBUG=1", 60, "sockets"),
    ("debug_detail", 2, "late", "pairs", "a skipped collective with TORCH_DISTRIBUTED_DEBUG=DETAIL", 60, "sockets"),
    ("all_defaults", 2, "late", "pairs", "a skipped collective, with torch's own waiting times", 110, "sockets"),
)  # fmt: skip
