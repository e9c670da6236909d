"""Names shared by the notebook side and the ranks: variables, paths, records. Standard library only."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

# The run folder. It marks every process of a job.
ENV_RUN = "DDPKIT_RUN"
# The host of an agent and its ranks, in a job of several agents.
ENV_NODE = "DDPKIT_NODE"
ENV_BACKEND = "DDP_BACKEND"
# "1": more NCCL ranks than GPUs share these.
ENV_SHARE_GPU = "DDPKIT_SHARE_GPU"
ENV_HOME = "DDPKIT_HOME"
ENV_LOG_CAP = "DDPKIT_LOG_CAP_MIB"
ENV_KEEP_RUNS = "DDPKIT_KEEP_RUNS"
ENV_WARM = "DDPKIT_WARM"
ENV_SHOW = "DDPKIT_SHOW"
ENV_WARM_IDLE_S = "DDPKIT_WARM_IDLE_S"
# The ranks write down parameters and gradients at every step, to be compared afterwards.
ENV_STEPS = "DDPKIT_STEPS"
# "RANK:STEP": that rank raises before it applies that step, to see whether the job then fails.
ENV_FAULT = "DDPKIT_FAULT"
# "0": the caller does not expect equal replicas, and the ranks write none down.
ENV_REPLICAS = "DDPKIT_REPLICAS"
# The seed of an exercise's data, and the number of ranks that a run in one process replaces.
ENV_SEED = "DDPKIT_SEED"
ENV_RANKS = "DDPKIT_RANKS"
# A TOML file with the answers to the lessons' questions, for a run of the notebooks without a reader.
ENV_ANSWERS = "DDPKIT_ANSWERS"
# torchrun's pid, which `os.getppid()` answers in its ranks.
ENV_AGENT = "DDPKIT_AGENT"
# The zygote's socket, for the ranks of a warm job.
ENV_ZYGOTE = "DDPKIT_ZYGOTE"
# Fills the zygote's environment, to make room for that of the processes it forks.
ENV_ROOM = "DDPKIT_ROOM"
# torchrun's own: the seconds from SIGTERM to SIGKILL. Its default is 30.
ENV_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SHUTDOWN_S = 30

# Seconds without a launch after which the zygote ends by itself.
WARM_IDLE_S = 1200

STREAMS = ("stdout", "stderr")

# Files of a run folder.
JOB = "job.json"
END = "end.json"
NODES = "nodes"
RANK_PYTHON = "rank-python"
KEEPER_FILE = "keeper.py"
# A -c program that imports the file by name, so that it is not compiled again.
CLIENT = "import sys; sys.path.insert(0, sys.argv[1]); import forked_client; forked_client.stand_in(*sys.argv[2:])"
BALLAST = "ballast"
FUNCTION_SCRIPT = "call_function.py"
CALL = "call.pkl"
CALL_CONTEXT = "call.json"
# The texts of the user's own modules, by file name.
SOURCES = "sources.json"

# Files of an agent's folder: the run folder, or nodes/<host>/ in it if there are several agents.
AGENT_RECORD = "agent.json"
AGENT_LOG = "torchrun.log"
LOGS = "logs"
# What the watcher on that host writes down a few times a second, and which look it has done last.
PULSE = "pulse.json"
LOOKED = "looked.json"
# In the run folder: the look that is asked of the watchers on the hosts; the hosts that do not see the run folder.
LOOK_ASKED = "look_asked.json"
NOT_SHARED = "not_shared.txt"

# What the reader answered before the run was revealed.
ANSWERED = "answered.json"
# What a student has done; it is in the same folder as runs/.
EXERCISES = "exercises.json"

# Files of the zygote's folder, which is a temporary one: a socket's path must be short.
ZYGOTE_SOCKET = "zygote.sock"
ZYGOTE_LOG = "zygote.log"

# Files of one rank's own folder, ranks/attempt_<n>/rank_<r>/.
STARTED = "started.json"
FAILURE = "failure.json"
FINISHED = "finished.json"
# The signals that the rank sent to other processes.
SENT = "sent.json"
# When the program's own SIGTERM handler last began; and, by the keeper, how long the rank may therefore still run.
HANDLER = "handler.json"
GRACE = "grace.json"
EXIT = "exit.json"
REPORTS = "reports.jsonl"
RETURNED = "returned.pkl"
# Reading these may run foreign code, so they never leave the machine.
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
# Written by the rank itself at a failure or its end, and on request at a standstill.
COLLECTIVES = "collectives.json"
COLLECTIVES_ASKED = "collectives_asked.json"
LOOK = "look.json"

_OF_A_PACKAGE = re.compile(r"^<(?!ipython)[^/\\]*$|[/\\](site|dist)-packages[/\\]|[/\\]torchinductor_")

# The known parts of a rank's memory; the rest of the peak are activations and temporaries.
MEMORY_PARTS = ("parameters", "gradients", "optimizer state", "DDP buckets")

# The questions sent through the pipe ASK: how many collectives there were, or which.
ASK_COUNT = b"c"
ASK_ENTRIES = b"e"


def rank_folder(run: str | os.PathLike[str], attempt: int, rank: int) -> Path:
    """The folder of the records of global rank `rank` in attempt `attempt`, counted from 0."""
    return Path(run) / "ranks" / f"attempt_{attempt}" / f"rank_{rank}"


def node_folder(run: str | os.PathLike[str], node: str) -> Path:
    """The folder of the agent on host `node`; that of the run if the job has one agent, "" for `node`."""
    return Path(run, NODES, node) if node else Path(run)


def node_folders(run: Path) -> list[Path]:
    """The folders of all agents of a job."""
    return sorted((run / NODES).glob("*")) or [run]


def own_rank_folder() -> Path | None:
    """The calling rank's folder, from torchrun's environment; None outside a ddpkit job."""
    run, rank = os.environ.get(ENV_RUN), os.environ.get("RANK")
    if not run or not rank:
        return None
    return rank_folder(run, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), int(rank))


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write `record` as JSON, whole or not at all; on a full disk, delete the job's ballast file for it."""
    text = json.dumps(record, default=str)
    try:
        _replace(path, text)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        give_up_ballast(path)
        _replace(path, text)


def read_record(path: Path) -> dict[str, Any] | None:
    """The record at `path`; None if it is missing or not whole."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_text(path: Path) -> str:
    """The text at `path`, bad bytes replaced; "" if it is missing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def written_ns(path: Path) -> int:
    """When the record at `path` was written, on the wall clock in nanoseconds; 0 if it is missing."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


@cache
def is_installed(file: str) -> bool:
    """Whether a file belongs to an installed package, or is code that a package generated."""
    return bool(_OF_A_PACKAGE.search(file)) or any(file in _installed_in(folder) for folder in Path(file).parents)


@cache
def _installed_in(folder: Path) -> set[str]:
    """The files that `pip install --target` put into a folder."""
    found = set()
    for record in folder.glob("*.dist-info/RECORD"):
        for line in read_text(record).splitlines():
            found.add(os.path.join(folder, line.partition(",")[0]))
    return found


def give_up_ballast(inside: Path) -> None:
    """Delete the ballast of the run folder around `inside`."""
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
