"""`ddpkit look` at real torchrun jobs that ddpkit did not start: whom the others wait for, and that the job goes on."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import BLOCKED, free_port, wait_for, wait_for_line

import ddpkit
from ddpkit.processes import running_jobs
from ddpkit.watcher.other_job import Seen, look_at

pytestmark = pytest.mark.job
BIN = Path(sys.executable).parent
PROGRAM = """
import os, sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, way = dist.get_rank(), sys.argv[1]
ones = torch.ones(3)
dist.all_reduce(ones)
pipe = open("go", "rb", buffering=0) if way == "pipe" and rank == 2 else None

def waits_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    threading.Thread(target=lambda: (released(), lock.release())).start()
    lock.acquire()  # for good

def released(work=lambda: time.sleep(0.02)):
    while not os.path.exists("go"):
        work()

print("ready", flush=True)
if way == "healthy":
    while not dist.all_reduce(held := torch.tensor(float(not os.path.exists("go")))) and held > 0:
        ones @ ones
elif way in ("sleeps", "computes", "two away"):
    if rank in (1, 2):
        released() if way == "sleeps" else released(lambda: sum(range(9)))  # rank 1
    dist.all_reduce(ones)  # rank 0
elif way in ("lock", "pipe"):
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    loss = net(ones).sum()
    if way == "lock" and rank == 1:
        waits_for_a_lock()
    if pipe:
        pipe.read()
    loss.backward()
elif way == "different":
    group = dist.new_group([0, 1])
    threading.Thread(target=lambda: (released(), os._exit(0))).start()
    dist.all_reduce(torch.ones(3)) if rank == 0 else dist.barrier(group)
dist.destroy_process_group()
os._exit(0)  # torch may abort during the interpreter's teardown, after a good run
"""


class Plain:
    """A torchrun job in `folder`, started without ddpkit; `free` lets its ranks go on."""

    def __init__(self, folder: Path, way: str, nproc: int, module: bool = False) -> None:
        self.folder, self.way = folder, way
        (folder / "train.py").write_text(PROGRAM.lstrip())
        if way == "pipe":
            os.mkfifo(folder / "go")
        self.log = folder / "out.txt"
        command = [str(BIN / "torchrun"), "--nproc-per-node", str(nproc), "--master-port", str(free_port())]
        with open(self.log, "wb") as log:
            words = ["-m", "train", way] if module else ["train.py", way]
            self.agent = subprocess.Popen([*command, *words], cwd=folder, stdout=log, stderr=log)
        if way == "pipe":
            self.pipe = os.open(folder / "go", os.O_WRONLY)
        wait_for(lambda: self.log.read_text().count("ready") == nproc or self.agent.poll() is not None, 120)

    def free(self) -> None:
        """Let the ranks go on to their end, which must be a good one."""
        os.close(self.pipe) if self.way == "pipe" else (self.folder / "go").touch()
        assert self.agent.wait(60) == 0, self.log.read_text()

    def seen(self, sentence: str, pid: int | None = None) -> Seen:
        """The look at the job in which `sentence` is said: its ranks may still be on their way there."""
        said: list[Seen] = []

        def says() -> bool:
            said.append(look_at(pid or self.agent.pid))
            return sentence in said[-1].sentence

        try:
            wait_for(says, 60)
        except AssertionError:
            raise AssertionError(f"{said[-1]}\n{self.log.read_text()}") from None
        return said[-1]


def processes_in(folder: Path) -> list[str]:
    """The other processes that work in `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.cwd() == str(folder):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.fixture
def plain(home: Path) -> Iterator[Callable[..., Plain]]:
    """Starts plain torchrun jobs; afterwards each must have ended, without a process left."""
    jobs: list[Plain] = []

    def start(way: str, nproc: int = 2, **options: Any) -> Plain:
        folder = home / f"job{len(jobs)}"
        folder.mkdir()
        jobs.append(Plain(folder, way, nproc, **options))
        return jobs[-1]

    yield start
    ended = [job.agent.poll() is not None for job in jobs]
    for job in jobs:
        job.agent.terminate()
        job.agent.wait(60)
    assert all(ended)
    assert not [line for job in jobs for line in processes_in(job.folder)]


def command(*words: object, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, str(BIN / "ddpkit"), "look", *map(str, words)], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("way", ["sleeps", "computes"])
def test_the_rank_outside_the_collective_is_waited_for(plain: Callable[..., Plain], way: str) -> None:
    job = plain(way)
    seen = job.seen("Rank 1 has not come to what rank 0 waits for at line")
    assert seen.waited_for == (1,) and not seen.unread
    does = "it sits at line" if way == "sleeps" else "it computes at line"
    assert "dist.all_reduce(ones)  # rank 0; " + does in seen.sentence and seen.sentence.endswith(
        "Rank 0 waits for it."
    )
    assert [process.busy > 0.2 for process in seen.processes.values()] == [False, way == "computes"]
    assert all((process.rss_mib or 0) > 50 for process in seen.processes.values())
    told = json.loads(command(seen.processes[1].pid, "--json").stdout)
    assert (told["waited_for"], told["agent"], told["world_size"]) == ([1], job.agent.pid, 2)
    assert told["ranks"][0]["stack"][0]["function"] == "all_reduce"
    shown = command(job.agent.pid)
    assert shown.returncode == 0 and "train.py" in shown.stdout.splitlines()[0] and "stack of rank 1" in shown.stdout
    job.free()


@pytest.mark.parametrize(("way", "nproc", "held_up_by"), [("lock", 2, 1), ("pipe", 3, 2)])
def test_a_hang_in_the_backward_of_ddp(plain: Callable[..., Plain], way: str, nproc: int, held_up_by: int) -> None:
    job = plain(way, nproc, module=way == "lock")
    seen = job.seen(f"Rank {held_up_by} has not come to what rank 0 waits for at line")
    assert seen.waited_for == (held_up_by,) and "loss.backward()" in seen.sentence
    assert ("lock.acquire()  # for good" if way == "lock" else "pipe.read()") in seen.sentence
    assert len(seen.processes) == nproc
    job.free()


def test_what_stacks_do_not_tell_is_said_so(plain: Callable[..., Plain]) -> None:
    apart = plain("different")
    seen = apart.seen("cannot be told")
    assert not seen.waited_for and "rank 0 waits at line" in seen.sentence and "rank 1 waits at line" in seen.sentence
    apart.free()
    away = plain("two away", 3)
    seen = away.seen("Which of ranks 1 and 2 the others wait for cannot be told.")
    assert (
        not seen.waited_for and "Rank 0 waits at line" in seen.sentence and "rank 2 computes at line" in seen.sentence
    )
    away.free()


def test_nobody_is_blamed_in_a_healthy_job(plain: Callable[..., Plain]) -> None:
    job = plain("healthy")
    for _ in range(3):
        seen = look_at(job.agent.pid)
        assert not seen.waited_for and "went on within 1.5 s" in seen.sentence, seen
    job.free()


def test_without_a_pid_it_is_the_only_job_or_a_list(
    plain: Callable[..., Plain], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [plain("sleeps"), plain("sleeps")]
    found = {job.agent: job for job in running_jobs.running_jobs()}
    ours = [found[job.agent.pid] for job in jobs]
    monkeypatch.setattr(running_jobs, "running_jobs", lambda: ours)
    with pytest.raises(running_jobs.SeveralJobs, match=f"name one by its PID(.|\n)*  {jobs[0].agent.pid}  torchrun "):
        look_at()
    monkeypatch.setattr(running_jobs, "running_jobs", lambda: ours[:1])
    assert look_at().job == ours[0]
    for job in jobs:
        job.free()


def test_no_job_is_one_sentence_and_exit_code_1() -> None:
    none = command(os.getpid())
    assert none.returncode == 1 and f"process {os.getpid()} is neither a torchrun agent nor" in none.stderr
    alone = ("unshare", "--pid", "--fork", "--mount-proc")
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this system gives no process namespace in which no job runs")
    none = command(before=alone)
    assert (none.returncode, none.stdout) == (1, "")
    assert "no torchrun job of yours runs on this host" in none.stderr and len(none.stderr.splitlines()) == 1


def test_where_stacks_may_not_be_read_the_rest_is_shown(plain: Callable[..., Plain], as_root: bool) -> None:
    if not as_root or not shutil.which("setpriv"):
        pytest.skip("only root can give up SYS_PTRACE, by setpriv")
    job = plain("sleeps")
    refused = command(job.agent.pid, before=("setpriv", "--bounding-set", "-sys_ptrace"))
    assert refused.returncode == 1 and "may not read the stacks of ranks 0 and 1" in refused.stdout
    assert "SYS_PTRACE" in refused.stdout and refused.stdout.count("· CPU ") == 2 and "waits" not in refused.stdout
    told = as_nobody(lambda: str(look_at(job.agent.pid)))
    assert "they belong to another user (uid 0)" in told and f"look {job.agent.pid}" in told and told.count("MiB") == 2
    job.free()


def as_nobody(say: Callable[[], str]) -> str:
    """What `say` returns in a process without root's rights."""
    # What it imports must be there before: that process may not be able to read root's Python.
    say()
    importlib.import_module("encodings.ascii")
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setuid(65534)
            said = say()
        except BaseException:
            said = traceback.format_exc()
        os.write(writes, said.encode())
        os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    with open(reads, encoding="utf-8") as answer:
        return answer.read()


@pytest.mark.cold
def test_a_job_that_ddpkit_started(script: Callable[[str], str], way: str) -> None:
    run = ddpkit.launch(script(BLOCKED), show=False, wait=False)
    try:
        wait_for_line(run, "ready")
        seen = wait_for(lambda: (seen := look_at(run.ranks[0].pid)).waited_for and seen, 60)
        assert seen.waited_for == (1,) and {r.rank: r.pid for r in run.ranks} == dict(seen.job.pids)
        assert run.state == "running" and not run.ranks[0].stack
    finally:
        run.stop()
        run.wait()
