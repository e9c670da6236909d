"""Slurm: what is refused before anything starts, the batch file on two nodes, states, cancelling, and lost nodes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_for
from slurm_cluster import Cluster, machines

from ddpkit.cli import main
from ddpkit.errors import LaunchError
from ddpkit.launcher.slurm import SlurmOptions, batch_file
from ddpkit.launcher.slurm_queue import QueueState, cancel, refuse_impossible, state_of, submit

# Seconds in which a busy machine schedules, starts or ends a job.
SOON = 40.0
TWO = SlurmOptions(nodes=2)
SLEEPS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]

__all__ = ["machines"]
pytestmark = pytest.mark.job


@pytest.fixture
def queue(machines: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, with an empty queue before and after: no job, and no process of one on any node."""
    monkeypatch.chdir(tmp_path)
    yield machines
    machines.wait_until_empty()


def sent(command: list[str], options: SlurmOptions = TWO, **others: Any) -> str:
    """Write the file for `command` and submit it; the output goes to out.txt."""
    Path("job.sbatch").write_text(batch_file(options, "a job", command, "out.txt", **others))
    return submit(Path("job.sbatch"))


def ended(job: str, seconds: float = SOON) -> QueueState:
    """The state of a job as soon as it has ended for good."""
    return wait_for(lambda: (seen := state_of(job)).ended and seen.state != "COMPLETING" and seen, seconds)


def until_up(job: str) -> None:
    """Return when both nodes have printed "up"."""
    wait_for(lambda: Path("out.txt").exists() and Path("out.txt").read_text().count("up") == 2, SOON)
    assert state_of(job) == QueueState("RUNNING")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"nodes": 0}, "launch: nodes=0 is not a number of machines; give 1 or more."),
        ({"nodes": "2"}, "launch: nodes='2' is not a number of machines; give 1 or more."),
        ({"partition": "a b"}, "launch: partition='a b' is not a name; give one word, or None for Slurm's default."),
        ({"account": ""}, "launch: account='' is not a name; give one word, or None for Slurm's default."),
        (
            {"time_limit": 30},
            'launch: time_limit=30 is not a time that sbatch knows; give minutes, such as "30", or "2:00:00".',
        ),
        (
            {"sbatch": "--exclusive"},
            "launch: sbatch='--exclusive' is one string; give a list, such as ['--exclusive'].",
        ),
        (
            {"sbatch": ["--gres", "gpu:4"]},
            "launch: 'gpu:4' in sbatch= is not an option; give each option and its value as one string, such as "
            '"--gres=gpu:4".',
        ),
        (
            {"sbatch": ["-N4"]},
            "launch: '-N4' in sbatch= has an argument of its own; use nodes=.",
        ),
        (
            {"sbatch": ["--array=1-4"]},
            "launch: '--array=1-4' in sbatch= is set by ddpkit, which starts one torchrun a node; leave it out.",
        ),
    ],
)
def test_wrong_options_are_told_in_one_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LaunchError) as error:
        SlurmOptions(**given)
    assert str(error.value) == sentence


@pytest.mark.parametrize("limit", ["30", "2:00", "2:00:00", "1-12", "1-12:30", "1-0:0:0"])
def test_the_times_that_sbatch_knows_are_taken(limit: str) -> None:
    assert f"#SBATCH --time={limit}\n" in batch_file(SlurmOptions(time_limit=limit), "x", ["true"], "out")


def test_a_host_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError) as error:
        refuse_impossible(TWO)
    assert str(error.value) == (
        "launch: slurm= asked for, but there is no sbatch on this host. Log in to a host of the cluster, or leave slurm= out."
    )
    assert state_of("1") == QueueState("SILENT", "scontrol: No such file or directory")


def test_a_controller_that_does_not_answer(queue: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = (queue.home / "slurm.conf").read_text()
    Path("slurm.conf").write_text(conf.replace("SlurmctldPort=", "MessageTimeout=1\nSlurmctldPort=9\n#"))
    Path("job.sbatch").write_text(batch_file(TWO, "x", ["true"], "out"))
    monkeypatch.setenv("SLURM_CONF", str(Path("slurm.conf").resolve()))
    with pytest.raises(LaunchError, match=r"^launch: Slurm's controller does not answer: .*; nothing was submitted\.$"):
        submit(Path("job.sbatch"))


def test_what_the_cluster_cannot_give_is_refused(queue: Cluster) -> None:
    refuse_impossible(TWO)
    refuse_impossible(SlurmOptions(nodes=2, partition="short"))
    refusals = {
        SlurmOptions(nodes=3): 'launch: 3 nodes asked for, but partition "p" has 2; use nodes=2.',
        SlurmOptions(
            nodes=9, partition="short"
        ): 'launch: 9 nodes asked for, but partition "short" has 2; use nodes=2.',
    }
    for options, sentence in refusals.items():
        with pytest.raises(LaunchError) as error:
            refuse_impossible(options)
        assert str(error.value) == sentence
    refusals = {
        SlurmOptions(partition="gpu"): (
            'launch: sbatch refused partition "gpu": Invalid partition name specified; the partitions here are p, short.'
        ),
        SlurmOptions(sbatch=("--gres=gpu:1",)): (
            "launch: sbatch refused the job: Invalid generic resource (gres) specification."
        ),
    }
    for options, sentence in refusals.items():
        with pytest.raises(LaunchError) as error:
            sent(["true"], options)
        assert str(error.value) == sentence


def test_a_job_that_waits_says_for_what(queue: Cluster) -> None:
    held = sent(["true"], SlurmOptions(sbatch=["--hold"]))
    long = sent(["true"], SlurmOptions(partition="short", time_limit="10"))
    assert state_of(held) == QueueState("PENDING", "JobHeldUser")
    assert state_of(held).words == "waits in the queue (JobHeldUser: its user holds it)"
    wait_for(lambda: state_of(long).never, SOON)
    assert QueueState("PENDING").words == "waits in the queue"
    for job in (held, long):
        assert state_of(job).waiting and not state_of(job).ended
        cancel(job)
        assert ended(job).state == "CANCELLED"
        assert state_of(job).words == "cancelled (scancel)"


def test_the_command_runs_once_on_each_node(queue: Cluster) -> None:
    """With its words as they were given and the same environment on both; the lines before it ran on the first alone."""
    code = "import os, sys; print([os.environ[n] for n in ('SLURMD_NODENAME', 'TEXT')], sys.argv[1:], flush=True)"
    words, text = ["it's", "two words", "$HOME", '"'], "a 'b' $c"
    job = sent(
        [sys.executable, "-c", code, *words],
        environment={"TEXT": text},
        before="hostname",
    )
    assert ended(job) == QueueState("COMPLETED")
    told = sorted(Path("out.txt").read_text().splitlines())
    assert told == [*(f"{[name, text]} {words}" for name in ("n1", "n2")), "n1"]


def test_names_paths_and_options_keep_their_spaces_and_quotes(queue: Cluster) -> None:
    Path("it's a #1").mkdir()
    options = SlurmOptions(sbatch=['--comment=two "words" it\'s', "-c2"])
    text = batch_file(options, "it's #1", ["bash", "-c", "echo $SLURM_CPUS_PER_TASK"], "it's a #1/out.txt")
    Path("job.sbatch").write_text(text)
    job = submit(Path("job.sbatch"))
    assert ended(job).state == "COMPLETED" and Path("it's a #1/out.txt").read_text() == "2\n2\n"
    shown = queue.said("scontrol", "show", "job", job)
    assert "JobName=it's_#1\n" in shown and 'Comment=two "words" it\'s' in shown


def test_a_notebook_inside_a_job_may_start_another(queue: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_NTASKS_PER_NODE": "7", "SLURM_JOB_ID": "77", "SBATCH_OUTPUT": "other.txt"}.items():
        monkeypatch.setenv(name, value)
    assert ended(sent(["bash", "-c", "echo up"])).state == "COMPLETED"
    assert Path("out.txt").read_text() == "up\nup\n" and not Path("other.txt").exists()


def test_if_one_node_fails_the_other_goes_on(queue: Cluster) -> None:
    job = sent(["bash", "-c", "if [ $SLURM_NODEID = 1 ]; then exit 5; fi; sleep 2; echo still here"])
    assert ended(job) == QueueState("FAILED", "NonZeroExitCode", exit_code=5)
    assert state_of(job).words == "failed with exit code 5"
    assert "still here" in Path("out.txt").read_text()


def test_cancelling_ends_the_processes_of_every_node(queue: Cluster) -> None:
    job = sent(SLEEPS)
    until_up(job)
    cancel(job)
    assert ended(job).state == "CANCELLED"


def test_the_time_limit_is_told_as_what_it_is(queue: Cluster) -> None:
    """Slurm looks at time limits every 30 seconds."""
    job = sent(SLEEPS, SlurmOptions(time_limit="2"))
    until_up(job)
    queue.said("scontrol", "update", f"jobid={job}", "EndTime=now")
    assert ended(job).state == "TIMEOUT" and state_of(job).words == "ended at its time limit"


def test_a_lost_node_leaves_the_other_running_until_the_job_is_cancelled(queue: Cluster) -> None:
    job = sent(SLEEPS)
    until_up(job)
    queue.kill_node("n2")
    assert state_of(job).state == "RUNNING"
    # What Slurm does by itself after SlurmdTimeout, minutes later.
    queue.said("scontrol", "update", "nodename=n2", "state=down", "reason=lost")
    wait_for(lambda: "Node failure on n2" in Path("out.txt").read_text(), SOON)
    assert queue.queue() == f"{job} RUNNING None n1" and queue.processes_of("n1")
    cancel(job)
    assert ended(job).state == "CANCELLED"
    queue.start_node("n2")


def test_a_node_that_slurm_has_lost_ends_a_job_that_does_not_ask_otherwise(queue: Cluster) -> None:
    text = batch_file(TWO, "x", SLEEPS, "out.txt").replace("#SBATCH --no-kill\n", "").replace(" --no-kill", "")
    Path("job.sbatch").write_text(text)
    job = submit(Path("job.sbatch"))
    until_up(job)
    queue.kill_node("n2")
    queue.start_node("n2")
    assert ended(job).state == "NODE_FAIL" and state_of(job).words == "ended: Slurm lost a node"


def test_the_death_of_the_first_node_leaves_the_other_to_be_cancelled(queue: Cluster) -> None:
    job = sent(SLEEPS)
    until_up(job)
    queue.kill_node("n1")
    assert queue.processes_of("n2")
    cancel(job)
    wait_for(lambda: not queue.processes_of("n2"), SOON)
    assert state_of(job).ended
    queue.start_node("n1")
    assert ended(job).state == "CANCELLED"


def test_a_folder_can_be_kept_from_a_node(queue: Cluster, tmp_path: Path) -> None:
    """And a batch node that lacks the folder of the output says so by a signal that does not exist."""
    Path("mine").mkdir()
    queue.kill_node("n1")
    queue.start_node("n1", hidden=(tmp_path,))
    Path("job.sbatch").write_text(batch_file(TWO, "x", ["hostname"], f"{tmp_path}/mine/out.txt"))
    seen = ended(submit(Path("job.sbatch")))
    assert (seen.state, seen.reason, seen.signal) == ("FAILED", "JobLaunchFailure", 53)
    queue.kill_node("n1")
    queue.start_node("n1")


def test_a_job_that_slurm_has_forgotten_is_looked_up_in_its_accounts(
    queue: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert state_of("999") == QueueState("GONE")
    sacct = tmp_path / "sacct"
    sacct.write_text("#!/bin/sh\necho 'CANCELLED by 0|0:15'\n")
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert state_of("999") == QueueState("CANCELLED", signal=15)


def test_the_printed_script_runs_as_it_is(queue: Cluster) -> None:
    """By sbatch, without ddpkit: torchrun's ranks on both nodes meet."""
    Path("hello.py").write_text(
        textwrap.dedent("""
        import os, sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        found = [None, None]
        dist.all_gather_object(found, os.uname().nodename)
        print("rank", dist.get_rank(), sorted(found), sys.argv[1:], "ddpkit" in sys.modules, flush=True)
        dist.destroy_process_group()
        """)
    )
    asked = ["script", "--nodes", "2", "-n", "1", "--time", "5", "hello.py", "it's"]
    told = subprocess.run(["ddpkit", *asked], capture_output=True, text=True, check=True)
    assert "ddpkit" not in told.stdout.replace(sys.executable, "")
    Path("plain.sbatch").write_text(told.stdout)
    job = subprocess.run(["sbatch", "--parsable", "plain.sbatch"], capture_output=True, text=True, check=True).stdout
    seen = ended(job.strip(), 120)
    text = Path(f"hello-{job.strip()}.out").read_text()
    assert seen.state == "COMPLETED", text
    for rank in range(2):
        assert f"rank {rank} ['n1', 'n2'] [\"it's\"] False\n" in text


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (["--nodes", "0", "x.py"], "launch: nodes=0 is not a number of machines; give 1 or more."),
        (["-n", "two", "x.py"], 'script: \'two\' is not a number of ranks; use 1 or more, "cpu", "gpu" or "auto".'),
        (["--backend", "mpi", "x.py"], 'script: backend "mpi" is not one of gloo, nccl; use one of them.'),
    ],
)
def test_a_script_that_cannot_be_printed(
    asked: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ddpkit", "script", *asked])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr() == ("", f"ddpkit: {sentence}\n")
