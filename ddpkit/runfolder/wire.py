"""The names both wings share: environment variables, run-folder paths and records. Standard library only."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

# Environment of a job. RUN marks every process of a job and tells it where its run folder is.
ENV_RUN = "DDPKIT_RUN"
ENV_BACKEND = "DDP_BACKEND"
# "1": ranks share GPUs by NCCL, where there are more ranks than GPUs.
ENV_SHARE_GPU = "DDPKIT_SHARE_GPU"
ENV_HOME = "DDPKIT_HOME"
ENV_LOG_CAP = "DDPKIT_LOG_CAP_MIB"
ENV_KEEP_RUNS = "DDPKIT_KEEP_RUNS"
ENV_WARM = "DDPKIT_WARM"
ENV_WARM_IDLE_S = "DDPKIT_WARM_IDLE_S"
# Set for a job whose parameters and gradients are to be compared afterwards: they are written down at every step.
ENV_STEPS = "DDPKIT_STEPS"
# "RANK:STEP": that rank raises before it applies that step, to see whether the job ends with an exit code that says so.
ENV_FAULT = "DDPKIT_FAULT"
# "0": the caller does not expect equal replicas, and the ranks write none down.
ENV_REPLICAS = "DDPKIT_REPLICAS"
# What a program of the exercises draws its data from; and, in one process, how many ranks it stands for.
ENV_SEED = "DDPKIT_SEED"
ENV_RANKS = "DDPKIT_RANKS"
# The process of torchrun, as its ranks are to see their parent.
ENV_AGENT = "DDPKIT_AGENT"
# Where the ranks of a warm job find the zygote.
ENV_ZYGOTE = "DDPKIT_ZYGOTE"
# Room in the zygote's own environment, for that of the processes it will fork.
ENV_ROOM = "DDPKIT_ROOM"

# Seconds without a launch after which the zygote ends by itself.
WARM_IDLE_S = 1200

STREAMS = ("stdout", "stderr")

# Files of a run folder.
JOB = "job.json"
END = "end.json"
AGENT_RECORD = "agent.json"
AGENT_LOG = "torchrun.log"
LOGS = "logs"
RANK_PYTHON = "rank-python"
KEEPER_FILE = "keeper.py"
# Python's own -c program, not a file: what is imported by name need not be compiled again.
CLIENT = "import sys; sys.path.insert(0, sys.argv[1]); import forked_client; forked_client.stand_in(*sys.argv[2:])"
BALLAST = "ballast"
FUNCTION_SCRIPT = "call_function.py"
CALL = "call.pkl"
CALL_CONTEXT = "call.json"
# The texts of the user's own modules, by file name.
SOURCES = "sources.json"

# What a student has done, beside the runs.
EXERCISES = "exercises.json"

# Files of the zygote's own folder, which lies where temporary files do: a socket's path must be short.
ZYGOTE_SOCKET = "zygote.sock"
ZYGOTE_LOG = "zygote.log"

# Files of one rank's own folder, ranks/attempt_<n>/rank_<r>/.
STARTED = "started.json"
FAILURE = "failure.json"
FINISHED = "finished.json"
# The signals that the rank has sent to other processes.
SENT = "sent.json"
EXIT = "exit.json"
REPORTS = "reports.jsonl"
RETURNED = "returned.pkl"
# What may run foreign code when it is read; it does not leave the machine.
PICKLED = {CALL, RETURNED}
STEPS = "steps.json"
STEP_TIMES = "steps.jsonl"
STEP_VALUES = "steps.f32"
FINAL_VALUES = "final.f32"
REPLICAS = "replicas.json"
REPLICA_VALUES = "replicas.f32"
MEMORY = "memory.jsonl"
STACK = "stack.txt"
CRASH = "crash.txt"
JOINING = "joining.json"
STORE = "store.json"
# What the rank logs by `ddpkit.rank.log_to`.
LOG = "log.txt"
ASK = "ask"
PROGRESS = "progress.json"
# As a rank writes them down by itself, at a failure or its end, and as it was asked for them at a standstill.
COLLECTIVES = "collectives.json"
COLLECTIVES_ASKED = "collectives_asked.json"
LOOK = "look.json"

# What is known of a rank's memory; what is left of the peak are activations and temporaries.
MEMORY_PARTS = ("parameters", "gradients", "optimizer state", "DDP buckets")

# What is asked through the pipe ASK: how many collectives there were, or what they were.
ASK_COUNT = b"c"
ASK_ENTRIES = b"e"


def rank_folder(run: str | os.PathLike[str], attempt: int, rank: int) -> Path:
    """Where the records of `rank` (global) in restart `attempt` (0 is the first) lie."""
    return Path(run) / "ranks" / f"attempt_{attempt}" / f"rank_{rank}"


def own_rank_folder() -> Path | None:
    """The calling rank's folder, from the environment torchrun set; None outside a ddpkit job."""
    run, rank = os.environ.get(ENV_RUN), os.environ.get("RANK")
    if not run or not rank:
        return None
    return rank_folder(run, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), int(rank))


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write `record` as JSON so that a reader sees all of it or nothing.

    On a full disk the ballast that `processes/agent.py` laid down is given up first: how a rank ended matters more.
    """
    text = json.dumps(record, default=str)
    try:
        _replace(path, text)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        give_up_ballast(path)
        _replace(path, text)


def read_record(path: Path) -> dict[str, Any] | None:
    """The record at `path`, or None when it is not there or not whole."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_text(path: Path) -> str:
    """The text at `path`, bad bytes replaced; "" when it is not there."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def written_ns(path: Path) -> int:
    """When the record at `path` was written, by the wall clock in nanoseconds; 0 where it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def give_up_ballast(inside: Path) -> None:
    """Delete the ballast of the run folder that holds `inside`, to make room on a full disk."""
    for folder in inside.parents:
        if (folder / JOB).exists():
            (folder / BALLAST).unlink(missing_ok=True)
            return


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
