"""A job in which nothing moves for a while: what is found then, that it is withdrawn when the job goes on, and who tells."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import RECORDS, wait_for, wait_for_line
from jobs import IMPORTS, STARTS

import ddpkit
from ddpkit.runfolder import wire

pytestmark = [pytest.mark.job, pytest.mark.usefixtures("warm_process")]


def begun(path: str, **options: object) -> ddpkit.Run:
    return ddpkit.launch(path, **{"wait": False, "show": False, "stall": 1.5, "timeout": 120, **options})


def looked_at(run: ddpkit.Run) -> bool:
    return len(run.ranks) == run.nproc and all(rank.look for rank in run.ranks)


@pytest.mark.parametrize(
    ("deed", "word"),
    [
        ("while not os.path.exists('go'): pass", "busy"),
        ("while not os.path.exists('go'): time.sleep(0.05)", "idle"),
    ],
    ids=["long computation", "slow save"],
)
def test_a_straggler_that_comes_back_leaves_no_verdict(
    script: Callable[..., str], home: Path, deed: str, word: str
) -> None:
    run = begun(script(STARTS["usual"] + f"if rank == 1:\n    {deed}\ndist.all_reduce(torch.ones(1))\n"))
    wait_for(lambda: looked_at(run), 60)
    look = run.ranks[1].look
    assert look is not None and (look.busy > 0.15) == (word == "busy")
    assert (
        not RECORDS
        or str(run.ranks[0].collective) == "waiting in all_reduce #4 (line 12: dist.all_reduce(torch.ones(1)))"
    )
    assert run.ranks[1].at is not None and "os.path.exists('go')" in run.ranks[1].at.source
    (home / "go").touch()
    run.wait()
    assert (run.state, run.culprit, run.verdict.sentence, run.notes) == ("passed", None, "", ())
    assert all(rank.look is None and not rank.stack for rank in run.ranks)


def test_a_job_is_not_ended_while_a_loaders_worker_computes(script: Callable[..., str]) -> None:
    text = """
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, i):
        until = time.time() + 4 * rank
        while i == 0 and time.time() < until:
            pass
        return torch.ones(1)
for x in torch.utils.data.DataLoader(Slow(), num_workers=1):
    dist.all_reduce(x)
"""
    run = begun(script(STARTS["usual"] + text), wait=True, stop_on_stall=True)
    assert (run.state, run.culprit) == ("passed", None), str(run)


def test_a_job_is_not_ended_while_a_rank_writes_much_to_a_slow_disk(script: Callable[..., str], tmp_path: Path) -> None:
    text = """
if rank == 1:
    with open("checkpoint.pt", "wb") as file:
        for _ in range(20):
            file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.2)
dist.barrier()
"""
    written = psutil.Process().io_counters().write_bytes
    (tmp_path / "probe").write_bytes(bytes(1 << 20))
    if psutil.Process().io_counters().write_bytes - written < 1 << 20:
        pytest.skip("the system does not count what is written to this file system")
    run = begun(script(STARTS["usual"] + text), wait=True, stop_on_stall=True)
    assert (run.state, run.culprit) == ("passed", None), str(run)


def test_a_job_is_not_ended_while_a_rank_waits_for_the_disk(script: Callable[..., str], home: Path) -> None:
    """Or for what cannot be interrupted either, and the system has the same word for: a child that does not come to its start."""
    text = """
if rank == 1:
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, "slow", os.O_RDONLY, 0)])
dist.barrier()
"""
    os.mkfifo(home / "slow")
    run = begun(script(STARTS["usual"] + text), stop_on_stall=True)
    wait_for(lambda: looked_at(run), 60)
    look = run.ranks[1].look
    os.close(os.open(home / "slow", os.O_RDWR))
    run.wait()
    assert look is not None and look.state == "disk-sleep"
    assert (run.state, run.culprit) == ("passed", None), str(run)


def test_a_job_is_not_ended_while_one_child_after_another_computes(script: Callable[..., str]) -> None:
    """As a compiler does: each of its programs is new, and ends before it has used much."""
    text = """
import subprocess
for _ in range(8 * (1 - rank)):
    subprocess.run([sys.executable, "-S", "-c", "import time; until = time.time() + 0.5\\nwhile time.time() < until: pass"])
dist.barrier()
"""
    run = begun(script(STARTS["usual"] + text), wait=True, stop_on_stall=True)
    assert (run.state, run.culprit) == ("passed", None), str(run)


@pytest.mark.soak
@pytest.mark.parametrize(
    "deed",
    [
        "if rank == 1: time.sleep(14)",
        "until = time.time() + 14\nwhile time.time() < until: pass",
        "if rank == 0:\n    for _ in range(14):\n        torch.save(torch.ones(1 << 20), 'part.pt')\n        time.sleep(1)",
    ],
    ids=["straggler", "long computation", "slow save"],
)
def test_fourteen_seconds_are_no_hang(
    script: Callable[..., str], capsys: pytest.CaptureFixture[str], deed: str
) -> None:
    path = script(STARTS["usual"] + deed + "\ndist.all_reduce(torch.ones(1))\ntime.sleep(1)\n")
    run = ddpkit.launch(path, show="text", timeout=120)
    shown = capsys.readouterr().out
    assert (run.state, run.culprit, run.verdict.sentence, run.notes) == ("passed", None, "", ())
    assert "No rank has made progress for 10 s." in shown and "The job goes on by itself." in shown
    assert "never" not in shown


def test_a_stopped_rank_that_goes_on_leaves_no_verdict(script: Callable[..., str]) -> None:
    run = begun(
        script(
            STARTS["usual"] + "print('ready', flush=True)\nif rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
            "dist.all_reduce(torch.ones(1))\n"
        )
    )
    wait_for(lambda: looked_at(run), 60)
    assert run.ranks[1].look is not None and run.ranks[1].look.state == "stopped"
    assert run.ranks[1].at is not None and "SIGSTOP" in run.ranks[1].at.source
    os.kill(run.ranks[1].pid or 0, signal.SIGCONT)
    run.wait()
    assert (run.state, run.culprit) == ("passed", None)


def test_collectives_exchanges_and_reports_are_progress(
    script: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten seconds without a line of output, and never 2 s without a collective, then without a send, then without a report."""
    body = """
from ddpkit.rank import report
for _ in range(35):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
for step in range(35):
    if step % 2:
        (dist.send if rank else dist.recv)(torch.ones(1), 1 - rank)
    else:
        (dist.isend if rank else dist.irecv)(torch.ones(1), 1 - rank).wait()
    time.sleep(0.1)
for step in range(35):
    report(step=step)
    time.sleep(0.1)
"""
    run = ddpkit.launch(script(STARTS["usual"] + body), show="text", stall=2, timeout=120)
    assert run.ok
    assert "No rank has made progress" not in capsys.readouterr().out


def test_a_rank_that_holds_the_gil_is_seen_all_the_same(script: Callable[..., str]) -> None:
    hold = "import re\n    re.match(r'(a+)+$', 'a' * 60 + 'b')"
    run = begun(script(STARTS["usual"] + f"if rank == 1:\n    {hold}\ndist.barrier()\n"), wait=True, stop_on_stall=True)
    assert (run.state, run.culprit) == ("hung", 1)
    assert "re.match" in run.verdict.sentence


def test_an_init_that_waits_is_not_disturbed_by_the_look(script: Callable[..., str], home: Path) -> None:
    """A signal would have torch's poll for the store give up."""
    wait = "if rank == 1:\n    while not os.path.exists('go'): time.sleep(0.05)\n"
    run = begun(script(IMPORTS + wait + STARTS["usual"]))
    wait_for(lambda: looked_at(run), 60)
    (home / "go").touch()
    run.wait()
    assert run.ok, str(run)


def test_without_py_spy_faulthandler_tells(script: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpkit.watcher.look.spied_threads", lambda pids: {})
    run = begun(
        script(STARTS["usual"] + "if rank == 1: time.sleep(1000)\ndist.barrier()\n"), wait=True, stop_on_stall=True
    )
    assert (run.state, run.culprit) == ("hung", 1)
    assert run.ranks[1].stack.startswith("Stack (most recent call first)")
    assert "time.sleep(1000)" in run.verdict.sentence


def test_other_threads_of_a_rank_are_in_its_stack(script: Callable[..., str]) -> None:
    body = """
import threading
def prefetch():
    time.sleep(1000)
threading.Thread(target=prefetch, daemon=True, name="prefetcher").start()
if rank == 1: time.sleep(999)
dist.barrier()
"""
    path = script(STARTS["usual"] + body)
    run = begun(path, wait=True, stop_on_stall=True)
    assert "prefetch" in run.ranks[0].stack and "ddpkit answers" not in run.ranks[0].stack
    assert run.ranks[1].at is not None and run.ranks[1].at.source == "if rank == 1: time.sleep(999)"
    Path(path).write_text("# edited since\n")
    assert str(ddpkit.Run.from_folder(run.folder)) == str(run)
    assert "    if rank == 1: time.sleep(999)\n" in run.ranks[1].stack


def test_the_verdict_is_held_back_until_it_is_asked_for(
    script: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(STARTS["usual"] + "if rank == 1: time.sleep(1000)\ndist.barrier()\n")
    run = begun(path, wait=True, stop_on_stall=True, show="text", reveal=False)
    shown = capsys.readouterr().out
    assert "never joined" not in shown and "has not joined" not in shown
    assert "never joined" in str(run.reveal(anyway=True))


def test_the_kernels_word_on_a_death_for_want_of_memory(script: Callable[..., str], home: Path) -> None:
    group = Path("/sys/fs/cgroup/memory/ddpkit-test")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("200M")
    except OSError as error:
        pytest.skip(f"no cgroup of version 1 can be made here: {error}")
    try:
        body = f"""
if rank == 1:
    open({str(group / "cgroup.procs")!r}, "w").write(str(os.getpid()))
    time.sleep(1)
    hoard = []
    while True:
        hoard.append(torch.ones(1 << 22))
dist.barrier()
"""
        run = ddpkit.launch(script(STARTS["usual"] + body), show=False, timeout=120)
    finally:
        group.rmdir()
    assert (run.state, run.culprit) == ("failed", 1)
    assert "was killed by the kernel because memory ran out" in run.verdict.sentence
    assert run.diagnosis is not None and run.diagnosis.name == "killed"


@pytest.mark.parametrize(
    ("kept_by", "told"),
    [
        ("atexit.register(dist.barrier)", "it waits in barrier #4, in its exit functions."),
        ("threading.Thread(target=time.sleep, args=(1000,)).start()", "it waits for its own threads to end."),
    ],
    ids=["exit functions", "threads"],
)
def test_an_exception_is_told_although_the_rank_cannot_end(
    script: Callable[..., str], capfd: pytest.CaptureFixture[str], kept_by: str, told: str
) -> None:
    text = f"import atexit, threading\n{STARTS['usual']}{kept_by}\nif rank == 1:\n    raise ValueError('boom')\n"
    run = ddpkit.launch(
        script(text + "dist.all_reduce(torch.ones(1))\n"), stall=2, stop_on_stall=True, timeout=120, show="text"
    )
    said = f"Rank 1 raised ValueError: boom (line 14: raise ValueError('boom')). It did not end then: {told}"
    assert (run.state, run.culprit) == ("hung", 1) and f"ddpkit: {said}\n" in capfd.readouterr().out
    assert run.verdict.sentence.startswith(said), run.verdict.sentence
    ended_s = (min(rank.told_ns for rank in run.ranks) - run.ranks[1].failure.at_ns) / 1e9
    # Threads may still end by themselves, a wait for another rank may not.
    assert ended_s < 8 or "threads" in told


def test_the_pipe_of_questions_is_the_users_own(script: Callable[..., str]) -> None:
    run = begun(script(STARTS["usual"] + "print('ready', flush=True); time.sleep(1000)\n"))
    wait_for_line(run, "ready")
    assert (run.ranks[0].folder / wire.ASK).stat().st_mode & 0o777 == 0o600
    run.stop()
