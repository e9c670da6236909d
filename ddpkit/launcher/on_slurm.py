"""A job on Slurm's hosts: submits it, follows it from the run folder and the queue, cancels it, finds it again."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpkit.display import notebook
from ddpkit.display.sink import Sink
from ddpkit.errors import LaunchError
from ddpkit.processes.agent import Job, write_rank_python
from ddpkit.run import Run
from ddpkit.runfolder import wire
from ddpkit.watcher.far import FarProgress
from ddpkit.watcher.watcher import Limits, Watcher

from .slurm import RENDEZVOUS, SlurmOptions, batch_file
from .slurm_queue import QueueState, cancel, state_of, submit

WHY_COLD = "it runs on Slurm's hosts"
BATCH_FILE, PLAIN_FILE, LOG = "job.sbatch", "plain.sbatch", "slurm.log"
PACKAGE_PARENT = str(Path(__file__).parents[2])
# Not `-m ddpkit...`: ddpkit may have been imported from a folder that Python does not search there.
BESIDE = f"import sys; sys.path.append({PACKAGE_PARENT!r}); from ddpkit.watcher.beside import main; main()"
EVERY_S = 0.1
# How often Slurm is asked: its controller serves everybody.
WAITING_S, RUNNING_S = 1.0, 5.0
# How long records may take to appear here after Slurm says that the job has ended, or the other way round.
SETTLES_S = 10.0
# A host that is silent may come back, from a slow disk, say. So long after it was called lost, the job goes on without it.
STAYS_LOST_S = 5.0
# Written by the batch file before any agent starts.
_CHECK = """\
lacking=$(srun --kill-on-bad-exit=0 bash -c 'test -e {job} || echo "$SLURMD_NODENAME"')
if [ "$lacking" ]; then echo "$lacking" > {not_shared}; exit 66; fi"""


class SlurmJob(Job):
    """Job `number` of Slurm, whose hosts write into the run folder `folder`."""

    def __init__(self, folder: Path, number: str, nodes: int) -> None:
        super().__init__(folder, WHY_COLD)
        self.number, self.nodes = number, nodes
        self._queue = QueueState("PENDING")
        self._told_to_end = False
        self._over = threading.Event()
        # The one end becomes readable when the other is closed.
        self._exit_fd, self._open_till_over = os.pipe()
        threading.Thread(target=self._follow, name=f"ddpkit asks Slurm about job {number}", daemon=True).start()

    @property
    def plain_command(self) -> str:
        """A shell line that submits the same job without ddpkit."""
        return f"sbatch {shlex.quote(str(self.folder / PLAIN_FILE))}"

    @property
    def running(self) -> bool:
        return not self._over.is_set()

    def exit_fds(self) -> list[int]:
        return [self._exit_fd]

    @property
    def waits(self) -> str:
        return f"Slurm job {self.number} {self._queue.words}." if self._queue.waiting else ""

    def _end(self) -> None:
        if self.end["reason"] == "timeout" and self._queue.waiting:
            self.end["by"] = f"The job was cancelled after its timeout: it {self._queue.words}."
        self._told_to_end = True
        cancel(self.number)

    def _exitcodes(self) -> dict[str, int | None]:
        # An agent that was told to end has not failed: Slurm ends the job, and tells the others, too.
        return {node: 0 if agent.get("told") else agent.get("exitcode") for node, agent in self._agents().items()}

    def _exitcode(self) -> int:
        return self._queue.exit_code or int(self._queue.state != "COMPLETED")

    def _follow(self) -> None:
        try:
            self._wait_for_the_end()
        finally:
            self._over.set()
            os.close(self._open_till_over)

    def _wait_for_the_end(self) -> None:
        next_ask, ended_at, lost_at = 0.0, None, 0.0
        while True:
            now = time.monotonic()
            if now >= next_ask:
                self._queue = state_of(self.number)
                next_ask = now + (WAITING_S if self._queue.waiting or ended_at or self._told_to_end else RUNNING_S)
            if not self.end.get("lost"):
                lost_at = now
            gone = self.end["lost"] if now - lost_at > STAYS_LOST_S else []
            ended = [own for own in self._hosts() if own.name in gone or (own / wire.AGENT_RECORD).exists()]
            if len(ended) >= self.nodes or self._queue.ended:
                ended_at = ended_at or now
                if self._is_known_how(ended) or now - ended_at > SETTLES_S:
                    self._note_the_end(ended)
                    return
                next_ask = min(next_ask, now + WAITING_S / 4)
            time.sleep(EVERY_S)

    def _hosts(self) -> list[Path]:
        return list((self.folder / wire.NODES).glob("*"))

    def _agents(self) -> dict[str, dict[str, Any]]:
        return {own.name: wire.read_record(own / wire.AGENT_RECORD) or {} for own in self._hosts()}

    def _is_known_how(self, ended: Sequence[Path]) -> bool:
        """Whether the hosts' records are complete, and tell why the job ended or Slurm does."""
        by_slurm = any(agent.get("told") for agent in self._agents().values()) and not self._told_to_end
        if self.end.get("lost") or (not by_slurm and len(ended) >= self.nodes):
            return True
        return self._queue.ended and self._queue.state != "COMPLETING" and len(ended) >= len(self._hosts())

    def _note_the_end(self, ended: Sequence[Path]) -> None:
        state = self._queue.state
        if self.end.get("lost") or len(ended) < len(self._hosts()):
            missing = {own.name for own in self._hosts()} - {own.name for own in ended}
            self.end["lost"] = sorted({*self.end.get("lost", []), *missing})
            cancel(self.number)
        elif not self._told_to_end and state in ("TIMEOUT", "DEADLINE"):
            self.end |= {"reason": "timeout", "by": f"Slurm job {self.number} was {self._queue.words}."}
        elif not self._told_to_end and state in ("CANCELLED", "PREEMPTED"):
            by = f"Slurm job {self.number} was {self._queue.words}, not by this run."
            self.end |= {"reason": "stopped", "by": by}
        if not self._hosts() and not self.end["reason"]:
            self.end["error"] = self._why_nothing_began()

    def _why_nothing_began(self) -> str:
        lacking = wire.read_text(self.folder / wire.NOT_SHARED).split()
        advice = f"set {wire.ENV_HOME} to a folder that all hosts share"
        if lacking:
            return f"{', '.join(lacking)} does not see the run folder {self.folder}; {advice}."
        if not (self.folder / LOG).exists():
            return f"the first host of Slurm job {self.number} does not see the run folder {self.folder}; {advice}."
        said = wire.read_text(self.folder / LOG).strip().splitlines()
        return f"Slurm job {self.number} {self._queue.words}: {said[-1] if said else self._queue.reason}"


def start_on_slurm(
    folder: Path,
    spec: Mapping[str, Any],
    program: Sequence[str],
    options: Sequence[str],
    slurm: SlurmOptions,
    env: Mapping[str, str],
) -> SlurmJob:
    """Submit the job of run folder `folder`: on each host torchrun with `options` starts `program`, in environment `env`.

    Raises:
        LaunchError: Slurm refuses it.
    """
    write_rank_python(folder)
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", RENDEZVOUS, *options, *program]
    beside = [sys.executable, "-P", "-c", BESIDE, str(folder), *torchrun]
    begin = f"cd {shlex.quote(spec['cwd'])}"
    job, not_shared = shlex.quote(str(folder / wire.JOB)), shlex.quote(str(folder / wire.NOT_SHARED))
    check = _CHECK.format(job=job, not_shared=not_shared)
    text = batch_file(slurm, spec["name"], beside, str(folder / LOG), before=f"{check}\n{begin}")
    (folder / BATCH_FILE).write_text(text)
    (folder / PLAIN_FILE).write_text(batch_file(slurm, spec["name"], torchrun, "%x-%j.out", spec["env"], begin))
    try:
        return SlurmJob(folder, submit(folder / BATCH_FILE, env), slurm.nodes)
    except LaunchError:
        shutil.rmtree(folder)
        raise


def attach(folder: Path, show: bool | str | Sink | None = None) -> Run:
    """The run in `folder`, watched again if it is a job on Slurm that has not ended; another one is only read."""
    spec = wire.read_record(folder / wire.JOB) or {}
    if not spec.get("slurm") or (folder / wire.END).exists():
        return Run(folder)
    job = SlurmJob(folder, spec["slurm"], spec["world_size"] // spec["nproc"])
    # Time counts from the submission, as it did for the process that launched the job.
    job.started -= (time.time_ns() - spec["started_ns"]) / 1e9
    run, sink = Run(folder, job), notebook.sink_for(show)
    sink.begin(run, lambda: job.stop("stopped"))
    sink.count_from(spec["started_ns"])
    notebook.show_live(sink)
    limits = Limits(spec.get("timeout_s"), spec.get("stall_s"), spec.get("stop_on_stall", False))
    Watcher(run, job, sink, limits, FarProgress(folder)).start()
    return run
