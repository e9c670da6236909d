"""`launch(slurm=)` on a real Slurm of two hosts: a run as on one machine, its queue, its ends, and a host that dies."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import STEPS, wait_for
from slurm_cluster import Cluster, machines

import ddpkit
from ddpkit.display.sink import Now, Sink
from ddpkit.launcher import on_slurm
from ddpkit.launcher.slurm_queue import QueueState, cancel, state_of
from ddpkit.runfolder import wire

__all__ = ["machines"]
pytestmark = pytest.mark.job
SOON = 60.0
TWO = ddpkit.SlurmOptions(nodes=2)

LEAVES = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(1000)
dist.all_reduce(torch.ones(1))
"""


@pytest.fixture
def queue(machines: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster; afterwards the queue is empty, and no process of a job is left on any host."""
    monkeypatch.chdir(tmp_path)
    Path("steps.py").write_text(STEPS)
    Path("leaves.py").write_text(LEAVES)
    yield machines
    machines.wait_until_empty()


class Heard(Sink):
    """Keeps what the watcher says of the job."""

    def __init__(self) -> None:
        self.notes: list[tuple[float, str]] = []

    def now(self, now: Now) -> None:
        self.notes.append((time.time(), now.note))


def launched(steps: int = 3, bad: int = -1, **options: Any) -> ddpkit.Run:
    given = {"slurm": TWO, "nproc": 1, "show": False, "timeout": 120, **options}
    return ddpkit.launch("steps.py", args=[steps, bad], **given)


def until_at_work(run: ddpkit.Run) -> None:
    """Return when every rank has made its first step."""
    wait_for(lambda: len(run.ranks) == 2 and all("step 0" in rank.stdout for rank in run.ranks), SOON)


def test_a_run_like_any_other_told_with_its_hosts(queue: Cluster) -> None:
    run = launched(bad=1)
    host = run.ranks[1].node
    assert (run.state, run.culprit) == ("failed", 1), run
    assert f"rank 1 on {host}: ValueError" in run.headline
    assert run.diagnosis and run.diagnosis.name == "own_exception"
    assert sorted(rank.node for rank in run.ranks) == ["n1", "n2"] and run.world_size == 2
    assert all(rank.stdout.count("step") == 3 for rank in run.ranks)
    assert run.facts == "2 ranks · 2 hosts of Slurm · gloo on CPU" and run.cold_because == "it runs on Slurm's hosts"
    assert str(ddpkit.Run.from_folder(run.folder)) == str(run)


def test_a_host_does_not_wait_for_one_that_has_failed(queue: Cluster) -> None:
    """The first host hosts the rendezvous; torchrun's own exit barrier would keep it waiting for 300 s."""
    Path("alone.py").write_text("import os\nif os.environ['DDPKIT_NODE'] == 'n2':\n    raise SystemExit(3)\n")
    run = ddpkit.launch("alone.py", slurm=TWO, nproc=1, show=False, timeout=150)
    assert run.state == "failed" and {rank.node: rank.exitcode for rank in run.ranks} == {"n1": 0, "n2": 3}, run


def test_each_host_looks_at_its_own_ranks(queue: Cluster) -> None:
    run = ddpkit.launch("leaves.py", slurm=TWO, nproc=1, show=False, stall=2, stop_on_stall=True, timeout=120)
    assert (run.state, run.culprit) == ("hung", 1), run
    assert "Rank 1 never joined all_reduce #1" in run.verdict.sentence
    assert all("leaves.py" in rank.stack for rank in run.ranks)


def test_stop_cancels_the_job(queue: Cluster) -> None:
    run = launched(steps=1000, wait=False)
    until_at_work(run)
    run.stop()
    assert run.state == "stopped" and run.verdict.sentence == "The job was stopped.", run
    assert [rank.told for rank in run.ranks] == ["SIGTERM", "SIGTERM"]


def test_a_job_that_somebody_else_cancels(queue: Cluster) -> None:
    run = launched(steps=1000, wait=False)
    until_at_work(run)
    cancel(number_of(run))
    run.wait(SOON)
    assert run.state == "stopped", run
    assert run.verdict.sentence == f"Slurm job {number_of(run)} was cancelled (scancel), not by this run."


@pytest.mark.parametrize(
    ("told", "by"), [("SIGTERM", "Slurm job 7 was cancelled (scancel), not by this run."), (None, None)]
)
def test_an_agent_that_ends_first_has_failed_unless_it_was_told_to_end(
    told: str | None, by: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, cancelled = ["RUNNING"], []
    monkeypatch.setattr(on_slurm, "state_of", lambda job: QueueState(state[0]))
    monkeypatch.setattr(on_slurm, "cancel", cancelled.append)
    for node in ("n1", "n2"):
        wire.node_folder(tmp_path, node).mkdir(parents=True)
    job = on_slurm.SlurmJob(tmp_path, "7", nodes=2)
    record = {"exitcode": 1, "told": told}
    wire.write_record(wire.node_folder(tmp_path, "n2") / wire.AGENT_RECORD, record)
    job.let_go()
    assert cancelled == ([] if told else ["7"])
    state[0] = "CANCELLED"
    wire.write_record(wire.node_folder(tmp_path, "n1") / wire.AGENT_RECORD, {"exitcode": 1, "told": "SIGTERM"})
    for fd in job.exit_fds():
        assert select.select([fd], [], [], SOON)[0]
    assert job.end.get("by") == by


@pytest.mark.soak
def test_a_job_that_slurm_ends_at_its_time_limit(queue: Cluster) -> None:
    """Slurm looks at time limits every 30 seconds."""
    run = launched(steps=10_000, wait=False)
    until_at_work(run)
    queue.said("scontrol", "update", f"jobid={number_of(run)}", "EndTime=now")
    run.wait(2 * SOON)
    assert run.state == "timed_out", run
    assert run.verdict.sentence == f"Slurm job {number_of(run)} was ended at its time limit.", run


def test_a_host_that_dies_is_named_within_ten_seconds(queue: Cluster) -> None:
    heard = Heard()
    run = launched(steps=1000, wait=False, show=heard)
    until_at_work(run)
    died = time.time()
    queue.kill_node("n2")
    try:
        run.wait(SOON)
        told = [at for at, note in heard.notes if "n2" in note]
        assert told and told[0] - died < 10, heard.notes[-3:]
        lost = next(rank.rank for rank in run.ranks if rank.node == "n2")
        assert (run.state, run.culprit) == ("failed", lost), run
        gone = (
            f"Host n2 is gone, and its agent left no record; rank {lost} ran there. Rank {1 - lost} lost it at line 5"
        )
        assert run.verdict.sentence.startswith(gone), run
        assert run.diagnosis and run.diagnosis.name == "node_lost"
    finally:
        queue.start_node("n2")


def test_a_kernel_that_restarts_finds_its_job_again(queue: Cluster, tmp_path: Path) -> None:
    program = (
        "import ddpkit, time\n"
        "run = ddpkit.launch('steps.py', args=[60, -1], nproc=1, slurm=ddpkit.SlurmOptions(nodes=2), show=False, wait=False)\n"
        "print(run.folder, flush=True)\ntime.sleep(1000)\n"
    )
    kernel = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert kernel.stdout
    folder = kernel.stdout.readline().strip()
    kernel.send_signal(signal.SIGKILL)
    kernel.wait()
    run = ddpkit.Run.attach(folder, show=False)
    assert run.state == "running"
    run.wait(SOON)
    assert run.ok and all(rank.stdout.count("step") == 60 for rank in run.ranks), run
    assert ddpkit.Run.attach(folder).ok


def test_a_job_that_never_leaves_the_queue(queue: Cluster) -> None:
    heard = Heard()
    held = ddpkit.SlurmOptions(nodes=2, sbatch=["--hold"])
    run = launched(slurm=held, timeout=3, show=heard)
    assert run.state == "timed_out" and not run.ranks, run
    assert "waits in the queue (JobHeldUser" in run.verdict.sentence, run
    assert any("waits in the queue" in note for _, note in heard.notes)


def test_a_run_folder_that_one_host_does_not_see(
    queue: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "own"
    home.mkdir()
    monkeypatch.setenv(wire.ENV_HOME, str(home))
    queue.kill_node("n2")
    queue.start_node("n2", hidden=(home,))
    try:
        run = launched()
        assert run.state == "failed" and not run.ranks, run
        assert f"n2 does not see the run folder {run.folder}; set {wire.ENV_HOME}" in run.verdict.sentence
    finally:
        queue.kill_node("n2")
        queue.start_node("n2")


REFUSED = [
    ({"slurm": ddpkit.SlurmOptions(partition="gpus")}, "the partitions here are p, short"),
    ({"slurm": ddpkit.SlurmOptions(nodes=3)}, "use nodes=2"),
    ({"slurm": {"nodes": 2}}, "ddpkit.SlurmOptions"),
    ({"nnodes": 2}, r"use SlurmOptions\(nodes=2\)"),
    ({"nproc": "gpu"}, "give a number of ranks for each host"),
    ({"share_gpu": True}, "several ranks on this machine"),
    ({"torchrun": ["--standalone"]}, "--standalone asked for with slurm="),
]


@pytest.mark.parametrize(("asked", "said"), REFUSED)
def test_what_is_refused_leaves_nothing_behind(queue: Cluster, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ddpkit.LaunchError, match=said):
        launched(**asked)
    assert not queue.queue()
    assert not list(Path(".ddpkit/runs").glob("*")) if Path(".ddpkit/runs").exists() else True


def number_of(run: ddpkit.Run) -> str:
    record = wire.read_record(run.folder / wire.JOB) or {}
    assert state_of(record["slurm"]).state != "GONE"
    return str(record["slurm"])
