"""A job in Slurm's queue: what cannot run there, submitting, its state, cancelling; by Slurm's own commands only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpkit.errors import LaunchError

from .slurm import SlurmOptions

# Slurm's commands answer in milliseconds; a controller that cannot be reached is given up by them after about 10 s.
ANSWER_S = 60.0
_SILENT = "Slurm's controller does not answer"
_ENDS = {
    "BOOT_FAIL": "ended: a node did not boot",
    "CANCELLED": "cancelled (scancel)",
    "COMPLETED": "completed",
    "DEADLINE": "ended at its deadline",
    "FAILED": "failed",
    "NODE_FAIL": "ended: Slurm lost a node",
    "OUT_OF_MEMORY": "ended for using more memory than it asked for",
    "PREEMPTED": "ended for a job with a higher priority",
    "TIMEOUT": "ended at its time limit",
}
_STATES = _ENDS | {"SILENT": "unknown: the controller does not answer", "GONE": "no longer known"}
# Reasons why a job waits that do not go away by themselves.
_NEVER = {
    "PartitionConfig": "the partition cannot give what the job asks for",
    "PartitionNodeLimit": "the partition allows fewer nodes",
    "PartitionTimeLimit": "the partition allows less time",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "JobHeldUser": "its user holds it",
    "JobHeldAdmin": "the administrator holds it",
    "BadConstraints": "no node satisfies its constraints",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its quality of service is not valid",
}


@dataclass(frozen=True)
class QueueState:
    """Where a job is in Slurm: its state and reason in Slurm's words, the batch file's exit code and signal.

    `state` is "SILENT" if the controller does not answer and "GONE" if Slurm no longer knows the job.
    """

    state: str
    reason: str = ""
    exit_code: int = 0
    signal: int = 0

    @property
    def waiting(self) -> bool:
        """Whether no node has been given to the job yet."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")

    @property
    def ended(self) -> bool:
        """Whether Slurm has ended the job, or no longer knows it; a lost node may still be "COMPLETING" for minutes."""
        return self.state in (*_ENDS, "COMPLETING", "GONE")

    @property
    def never(self) -> str:
        """Why the job waits for something that will not come by itself; "" if waiting may help."""
        return _NEVER.get(self.reason, "") if self.waiting else ""

    @property
    def words(self) -> str:
        """The state in words, to follow "Slurm: "."""
        if self.waiting:
            why = ": ".join(filter(None, [self.reason, self.never]))
            return f"waits in the queue ({why})" if why else "waits in the queue"
        if self.state == "FAILED":
            return f"failed with {f'signal {self.signal}' if self.signal else f'exit code {self.exit_code}'}"
        return _STATES.get(self.state, self.state.lower())


def refuse_impossible(options: SlurmOptions) -> None:
    """Check before anything is written that this host has a Slurm, and that its partition has the nodes.

    Raises:
        LaunchError: there is no Slurm, its controller does not answer, or the partition is too small.
    """
    if not shutil.which("sbatch"):
        advice = "Log in to a host of the cluster, or leave slurm= out."
        raise LaunchError(f"launch: slurm= asked for, but there is no sbatch on this host. {advice}")
    found = _sizes()
    name = options.partition or next((name for name in found if name.endswith("*")), "")
    has = found.get(name, found.get(f"{name}*", options.nodes))
    if options.nodes > has:
        shown = name.rstrip("*")
        raise LaunchError(
            f'launch: {options.nodes} nodes asked for, but partition "{shown}" has {has}; use nodes={has}.'
        )


def submit(path: Path, environment: Mapping[str, str] | None = None) -> str:
    """Send the batch file to the queue with `environment` (by default this process's); return the job's id.

    Raises:
        LaunchError: Slurm did not take the job.
    """
    text = path.read_text()
    env = {}
    for key, value in (os.environ if environment is None else environment).items():
        # What describes the job that a notebook runs in is not for the new one; what the file says beats a default.
        option = key.removeprefix("SBATCH_").lower().replace("_", "-").replace("timelimit", "time")
        of_the_file = key.startswith("SBATCH_") and f"\n#SBATCH --{option}" in text
        if not of_the_file and (key in ("SLURM_CONF",) or not key.startswith(("SLURM_", "SLURMD_", "SBATCH_EXPORT"))):
            env[key] = value
    done = _asked(["sbatch", "--parsable", "--export=ALL", str(path)], env)
    if done.returncode == 0:
        return done.stdout.strip().split(";")[0]
    said = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines()]
    reason = (said or [f"exit code {done.returncode}"])[-1].removeprefix("Batch job submission failed: ")
    if "partition" in reason.lower():
        there = ", ".join(name.rstrip("*") for name in _sizes())
        asked = re.search(r"^#SBATCH --partition=(\S+)", text, re.MULTILINE)
        which = f'partition "{asked[1]}"' if asked else "the default partition"
        raise LaunchError(f"launch: sbatch refused {which}: {reason}; the partitions here are {there}.")
    if "contact slurm controller" in reason:
        raise LaunchError(f"launch: {_SILENT}: {reason}; nothing was submitted.")
    raise LaunchError(f"launch: sbatch refused the job: {reason}.")


def state_of(job: str) -> QueueState:
    """What Slurm says of a job: `scontrol` while it remembers the job, then `sacct` if this Slurm keeps accounts."""
    done = _asked(["scontrol", "show", "job", "-o", job])
    if done.returncode == 0:
        # A requeued job is shown once; an array is refused. Names hold no spaces, so the first match is Slurm's.
        said = dict(re.findall(r"(?:^| )(\w+)=(\S*)", done.stdout)[::-1])
        code, _, signal = said.get("ExitCode", "0:0").partition(":")
        reason = said.get("Reason", "").replace("None", "")
        return QueueState(said["JobState"], reason, int(code), int(signal or 0))
    if "Invalid job id" not in done.stderr:
        return QueueState("SILENT", (done.stderr.strip().splitlines() or [""])[-1])
    done = _asked(["sacct", "-j", job, "-X", "-n", "-P", "-o", "State,ExitCode"])
    fields = done.stdout.strip().split("\n")[0].split("|")
    if done.returncode or len(fields) < 2:
        return QueueState("GONE")
    code, _, signal = fields[1].partition(":")
    return QueueState(fields[0].split()[0], "", int(code or 0), int(signal or 0))


def cancel(job: str) -> None:
    """End a job, whether it waits or runs; no error if it has ended. Its processes get SIGTERM, after KillWait SIGKILL."""
    _asked(["scancel", job])


def _asked(command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands; one that does not end in time, or is not there, fails with a sentence on stderr."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            env=env,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]} gave no answer in {ANSWER_S:.0f} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]}: {error.strerror}")


def _sizes() -> dict[str, int]:
    """The partitions with their numbers of nodes; the default's name ends with "*"."""
    done = _asked(["sinfo", "-h", "-o", "%P|%D"])
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise LaunchError(f"launch: {_SILENT}: {last}; nothing was submitted.")
    found: dict[str, int] = {}
    for line in done.stdout.splitlines():
        name, _, count = line.partition("|")
        # From 10,000 nodes on, Slurm rounds: "12K".
        found[name] = found.get(name, 0) + (int(count) if count.isdigit() else 10_000)
    return found
