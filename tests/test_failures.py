"""Every way a job can go wrong, as a real job: control comes back, the culprit is right, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import BLOCKED, RECORDS, left_after, living, process_of, wait_for_line, wait_until_blocked

import ddpkit
from ddpkit.runfolder import wire

# Every way to fail, in a job forked from the zygote and in one started cold.
pytestmark = [pytest.mark.job, pytest.mark.usefixtures("way")]

PREAMBLE = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
"""


def launch(path: str, **options: object) -> ddpkit.Run:
    run = ddpkit.launch(path, show=False, **{"timeout": 120, **options})
    assert run.warm == (os.environ[wire.ENV_WARM] == "1"), run.started
    return run


@pytest.mark.parametrize("destroy", [False, True], ids=["plain", "destroys_in_finally"])
def test_a_raising_rank_is_named_and_its_peer_is_a_consequence(script: Callable[..., str], destroy: bool) -> None:
    ending = "dist.destroy_process_group()" if destroy else "pass"
    path = script(
        PREAMBLE
        + f"""
try:
    if rank == 1:
        print(time.time_ns(), flush=True)
        raise ValueError("boom at step 3")
    dist.all_reduce(torch.ones(3))
finally:
    {ending}
"""
    )
    run = launch(path)
    back_ns = time.time_ns()
    assert run.state == "failed"
    assert run.culprit == 1
    assert (back_ns - int(run.ranks[1].stdout)) / 1e9 < 5
    assert run.ranks[1].failure.type == "ValueError"
    assert run.ranks[1].failure.message == "boom at step 3"
    assert run.ranks[1].failure.where.source == 'raise ValueError("boom at step 3")'
    assert run.ranks[0].role == "consequence"
    assert "Connection" in run.ranks[0].stderr
    assert 'raise ValueError("boom at step 3")' in str(run)
    assert "bootstrap.py" not in run.ranks[1].stderr, "ddpkit's own frames show in the user's traceback"


@pytest.mark.parametrize(
    ("deed", "name"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("import ctypes; ctypes.CDLL(None).abort()", "SIGABRT"),
    ],
)
def test_a_rank_killed_by_a_signal_is_named_with_it(script: Callable[..., str], deed: str, name: str) -> None:
    run = launch(
        script(
            PREAMBLE
            + f"""
def die():
    print(time.time_ns(), flush=True)
    {deed}

if rank == 1:
    die()
dist.all_reduce(torch.ones(3))
"""
        )
    )
    back_ns = time.time_ns()
    assert (run.state, run.culprit) == ("failed", 1)
    assert (back_ns - int(run.ranks[1].stdout)) / 1e9 < 5
    assert run.ranks[1].signal == name
    assert run.ranks[1].exitcode == -getattr(signal, name)
    assert name in str(run)
    assert run.ranks[0].role == "consequence"
    if name != "SIGKILL":
        assert run.ranks[1].failure.where.source == deed, "the crashing line is known from the stack faulthandler left"


@pytest.mark.skipif(not RECORDS, reason="this torch records no collectives of gloo")
def test_a_rank_that_gloo_aborts_has_written_down_what_it_was_in(script: Callable[..., str]) -> None:
    """Both ranks have begun two sums; in which of them rank 0 was when it was aborted no stack tells."""
    run = launch(
        script(
            PREAMBLE
            + """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
up = __file__ + ".up"
while rank == 1 and not os.path.exists(up):
    time.sleep(0.01)
begun = [dist.all_reduce(torch.ones(size * (1 + 99 * rank)), async_op=True) for size in (10, 20)]
open(up, "w").close()
for work in begun:
    work.wait()
"""
        )
    )
    aborted = run.ranks[0]
    assert (run.state, aborted.signal, aborted.exitcode) == ("failed", "SIGABRT", -6)
    *before, first, second = aborted.collectives
    assert [(c.sizes, c.done, c.where.line) for c in (first, second)] == [(((n,),), False, 11) for n in (10, 20)]
    assert before[-1].where.source.endswith(".backward()"), "and those that DDP makes in C++"
    assert aborted.failure.where.line > 11, "faulthandler has its turn after it"
    assert aborted.stderr.count("terminate called") == 1


def test_of_two_own_failures_the_earlier_counts(script: Callable[..., str]) -> None:
    """Rank 1 waits until rank 0 is up, which it would otherwise keep from coming up."""
    run = launch(
        script(
            PREAMBLE
            + """
up = __file__ + ".up"
if rank == 1:
    while not os.path.exists(up):
        time.sleep(0.01)
    raise KeyError("first")
open(up, "w").close()
time.sleep(0.3)
raise ValueError("second")
"""
        )
    )
    assert run.culprit == 1
    assert "Later rank 0 raised ValueError: second" in run.verdict.sentence


def test_every_rank_failing_alike_is_no_race(script: Callable[..., str]) -> None:
    path = script(
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        dist.init_process_group("gloo")
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            def forward(self, x):
                return self.used(x)
        ddp = DDP(Net())
        for step in range(3):
            loss = ddp(torch.ones(2, 4)).sum()
            loss.backward()
        """
    )
    texts = set()
    for _ in range(3):
        run = launch(path)
        assert run.culprit == "every rank"
        assert {r.role for r in run.ranks} == {"culprit"}
        texts.add(str(run))
    assert len(texts) == 1, texts
    assert "loss = ddp(torch.ones(2, 4)).sum()" in texts.pop()


def test_a_rank_at_the_very_line_that_failed_gets_to_fail_alike(script: Callable[..., str]) -> None:
    """Rank 1 fails there a good second after it was looked at because rank 0 had."""
    run = launch(
        script(
            """
            import os, subprocess
            folder, rank = os.environ["DDPKIT_RUN"], os.environ["RANK"]
            seen = f"{folder}/ranks/attempt_0/rank_1/look.json"
            command = f"until test -e {seen}; do sleep 0.05; done; sleep 1.5; exit 1" if rank == "1" else "exit 1"
            subprocess.run(["sh", "-c", command], check=True)
            """
        )
    )
    assert run.culprit == "every rank", str(run)
    assert {r.failure.type for r in run.ranks} == {"CalledProcessError"}


def test_an_early_leaver_is_told_when_its_peer_loses_it(script: Callable[..., str]) -> None:
    run = launch(
        script(PREAMBLE + "if rank == 1: dist.destroy_process_group(); sys.exit(0)\ndist.all_reduce(torch.ones(3))\n")
    )
    assert (run.state, run.culprit) == ("failed", 1)
    assert run.ranks[1].exitcode == 0
    assert "left early" in run.verdict.sentence


def test_an_early_leaver_is_told_when_another_hangs_on(script: Callable[..., str]) -> None:
    # Three ranks: rank 0 keeps the sockets of rank 2's ring alive, rank 1 leaves before the others' barrier.
    run = launch(
        script(
            """
            import os, sys, torch, torch.distributed as dist
            rank = int(os.environ["RANK"])
            if rank == 1:
                sys.exit(0)
            dist.init_process_group("gloo")
            """
        ),
        timeout=15,
    )
    assert (run.state, run.culprit) == ("timed_out", 1)
    assert "left early" in run.verdict.sentence
    assert 'dist.init_process_group("gloo")' in run.verdict.sentence


def test_sys_exit_with_a_text_is_a_failure_with_that_text(script: Callable[..., str]) -> None:
    run = launch(script(PREAMBLE + 'if rank == 1: sys.exit("no data under /data")\ndist.all_reduce(torch.ones(3))\n'))
    assert run.culprit == 1
    assert run.ranks[1].exitcode == 1
    assert run.ranks[1].failure.message == "no data under /data"
    assert "no data under /data" in run.ranks[1].stderr


def test_an_exit_code_without_an_exception_is_kept(script: Callable[..., str]) -> None:
    run = launch(script(PREAMBLE + "if rank == 1: os._exit(7)\ndist.all_reduce(torch.ones(3))\n"))
    assert (run.culprit, run.ranks[1].exitcode) == (1, 7)
    assert "Rank 1 left by os._exit, exit code 7 (line 5: if rank == 1: os._exit(7))" in str(run)
    assert run.diagnosis is not None and run.diagnosis.name == "exit_code"


def test_os_exit_within_a_handler_tells_what_was_handled(script: Callable[..., str]) -> None:
    body = "try:\n    if rank == 1: raise ValueError('a bad shard')\n    dist.all_reduce(torch.ones(3))\n"
    run = launch(script(f"{PREAMBLE}{body}except (ValueError, RuntimeError):\n    os._exit(3)\n"))
    assert run.culprit == 1
    assert (
        "raised ValueError: a bad shard" in run.verdict.sentence
        and "caught it, and left by os._exit, exit code 3" in run.verdict.sentence
    )
    assert run.ranks[0].exitcode != 0


def test_os_exit_with_0_is_an_early_exit_with_its_line(script: Callable[..., str]) -> None:
    run = launch(script(PREAMBLE + "if rank == 1:\n    os._exit(0)\ndist.all_reduce(torch.ones(3))\n"))
    assert (run.culprit, run.ranks[1].exitcode) == (1, 0)
    assert "left early with exit code 0 at line 6: os._exit(0)" in run.verdict.sentence


@pytest.mark.cold
def test_stop_ends_a_job_blocked_in_cpp(script: Callable[..., str]) -> None:
    run = launch(script(BLOCKED), wait=False)
    wait_for_line(run, "ready")
    before = time.monotonic()
    run.stop()
    assert time.monotonic() - before < 3
    assert run.state == "stopped"
    assert "ready" in run.ranks[0].stdout
    assert run.culprit is None


@pytest.mark.cold
def test_ctrl_c_gives_control_back(script: Callable[..., str], home: Path) -> None:
    path = script(BLOCKED)
    main = os.getpid()
    # A shell that starts the tests in its background has them ignore the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    watcher = os.fork()
    if watcher == 0:
        # Presses Ctrl-C in the launching process, and leaves without running anything of pytest's.
        try:
            wait_until_blocked(home)
            os.kill(main, signal.SIGINT)
        finally:
            os._exit(0)
    run = launch(path)
    os.waitpid(watcher, 0)
    assert run.state == "stopped"
    assert "ready" in run.ranks[1].stdout


@pytest.mark.cold
def test_a_killed_agent_takes_its_ranks_along(script: Callable[..., str]) -> None:
    # Neither waits for the other: else one may meet the other's closed connection before its own end.
    run = launch(script(PREAMBLE + 'print("ready", flush=True)\ntime.sleep(1000)\n'), wait=False)
    wait_for_line(run, "ready")
    process_of(run, "torch.distributed.run", without=wire.KEEPER_FILE).kill()
    run.wait(30)
    assert run.state == "failed"
    assert "torchrun itself was killed by SIGKILL" in str(run)
    assert [r.exitcode for r in run.ranks] == [-signal.SIGTERM] * 2


@pytest.mark.cold
@pytest.mark.parametrize("victim", ["keeper.py rank", "keeper.py agent"])
def test_a_killed_keeper_leaves_nothing(script: Callable[..., str], victim: str) -> None:
    run = launch(script(BLOCKED), wait=False)
    wait_for_line(run, "ready")
    process_of(run, victim).kill()
    run.wait(30)
    assert run.state == "failed"
    assert not left_after(run.folder, 10)


@pytest.mark.cold
def test_restarts_are_told_apart(script: Callable[..., str]) -> None:
    run = launch(
        script(
            """
            import os
            attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
            print("attempt", attempt, "of rank", os.environ["RANK"], flush=True)
            if attempt == "0" and os.environ["RANK"] == "1":
                raise RuntimeError("only once")
            """
        ),
        max_restarts=1,
    )
    assert run.ok
    assert len(run.attempts) == 2
    assert run.attempts[0][1].failure.message == "only once"
    assert run.attempts[0][1].role == "culprit"
    assert run.attempts[0][1].stdout == "attempt 0 of rank 1\n"
    assert run.ranks[1].stdout == "attempt 1 of rank 1\n"
    assert any("attempt 2" in note for note in run.notes)


def test_a_restart_that_meets_the_addresses_of_the_attempt_before_is_told_so(
    script: Callable[..., str], way: str
) -> None:
    """Which address a rank of attempt 2 reads from torchrun's store is a race; a store for each attempt has none."""
    path = script(
        PREAMBLE
        + """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == 1:
    raise RuntimeError("only once")
dist.barrier()
dist.destroy_process_group()
"""
    )
    for _ in range(3 if way == "warm" else 1):
        run = launch(path, max_restarts=1, stall=5, stop_on_stall=True)
        if not run.ok:
            assert (run.culprit, run.diagnosis.name) == (None, "restart_meets_old_addresses"), str(run)
            assert "attempt 2" in run.verdict.sentence and "attempt before" in run.diagnosis.title
    ddpkit.launch(
        path, max_restarts=1, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, timeout=120, show=False
    ).check()


@pytest.mark.cold
def test_a_rank_that_ignores_sigterm_is_killed_and_it_is_said(script: Callable[..., str]) -> None:
    run = launch(
        script(
            """
            import os, signal, time
            if os.environ["RANK"] == "0":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("ready", flush=True)
            time.sleep(1000)
            """
        ),
        wait=False,
    )
    wait_for_line(run, "ready")
    before = time.monotonic()
    run.stop()
    assert time.monotonic() - before < 8
    assert run.ranks[0].signal == "SIGKILL"
    assert any("ignored SIGTERM" in note for note in run.notes)


# Its handler takes longer than the 2 s of a rank that has none.
SAVES = (
    PREAMBLE
    + """
def save(number, frame):
    print("saving", flush=True)
    time.sleep(SECONDS)
    open(f"saved_{rank}", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
assert signal.getsignal(signal.SIGTERM) is save
print("ready", flush=True)
if rank == 1 and "fails" in sys.argv:
    raise ValueError("boom")
if "hangs" in sys.argv and rank == 0:
    dist.barrier()
time.sleep(1000)
"""
)


@pytest.mark.cold
def test_a_rank_that_saves_at_sigterm_gets_torchruns_time(script: Callable[..., str], home: Path) -> None:
    path = script(SAVES.replace("SECONDS", "3"))
    run = launch(path, args=["fails"], stall=2, stop_on_stall=True)
    assert (run.state, run.culprit, run.notes) == ("failed", 1, ()), str(run)
    assert run.ranks[0].words == "ended by torchrun" and (home / "saved_0").exists()
    (home / "saved_0").unlink()
    run = launch(path, wait=False)
    wait_for_line(run, "ready")
    assert (run.stop().state, run.notes) == ("stopped", ())
    assert [(r.exitcode, r.words) for r in run.ranks] == [(0, "stopped")] * 2
    assert (home / "saved_0").exists() and (home / "saved_1").exists()


@pytest.mark.parametrize("limit", [{"stall": 2, "stop_on_stall": True}, {"timeout": 10, "stall": None}], ids=str)
def test_a_hung_job_whose_ranks_save_when_it_is_ended_is_still_hung(
    script: Callable[..., str], home: Path, capfd: pytest.CaptureFixture[str], limit: dict[str, Any]
) -> None:
    path = script(
        SAVES.replace("SECONDS", "3").replace(
            "if rank == 1", "if rank == 0: signal.signal(15, signal.SIG_DFL)\nif rank == 1"
        )
    )
    run = ddpkit.launch(path, args=["hangs"], show="text", **{"timeout": 120, **limit})
    assert (run.state, run.culprit) == ("hung" if "stop_on_stall" in limit else "timed_out", 1), str(run)
    assert "Rank 1 never joined barrier #1" in run.verdict.sentence and (home / "saved_1").exists()
    assert (
        "Rank 1 handles SIGTERM by `save`, and has 29.5 s for that. Stop again to end it at once."
        in capfd.readouterr().out
    )


@pytest.mark.cold
def test_a_second_stop_ends_a_saving_rank_at_once(script: Callable[..., str], home: Path) -> None:
    run = launch(script(SAVES.replace("SECONDS", "1000")), wait=False)
    wait_for_line(run, "ready")
    threading.Thread(target=run.stop, daemon=True).start()
    wait_for_line(run, "saving")
    before = time.monotonic()
    run.stop()
    assert time.monotonic() - before < 2 and not living(home)
    assert (run.state, [r.signal for r in run.ranks], run.notes) == ("stopped", ["SIGKILL"] * 2, ())


def test_a_saving_rank_gets_the_time_that_torchrun_was_given(script: Callable[..., str]) -> None:
    path = script(SAVES.replace("SECONDS", "1000"))
    for given in ({"torchrun": ["--shutdown-timeout=3"]}, {"env": {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3"}}):
        run = launch(path, args=["fails"], **given)
        assert run.notes == ("rank 0 handled SIGTERM for 2.5 s and was ended by SIGKILL.",)


def test_a_job_longer_than_its_timeout_ends_with_stacks(script: Callable[..., str]) -> None:
    run = launch(script(BLOCKED), timeout=20)
    assert run.state == "timed_out"
    assert "all_reduce" in run.ranks[0].stack
    assert "train.py" in run.ranks[1].stack
    assert all("ready" in r.stdout for r in run.ranks)
    assert "timeout=20 s" in str(run) and run.headline.startswith("train → hung, and timed out · 2 ranks · rank 1")
    assert "  line 5: dist.all_reduce(torch.ones(3))" in str(run)
    assert run.culprit == 1


def test_a_stall_gathers_stacks_and_may_end_the_job(script: Callable[..., str]) -> None:
    run = launch(script(BLOCKED), stall=6, stop_on_stall=True)
    assert run.state == "hung"
    assert "all_reduce" in run.ranks[0].stack


@pytest.mark.cold
def test_a_stopped_job_launched_from_a_thread_that_ends_lives_on(script: Callable[..., str]) -> None:
    import threading

    path = script(PREAMBLE + "time.sleep(1)\ndist.barrier()\nprint('done')\ndist.destroy_process_group()\n")
    runs: list[ddpkit.Run] = []
    button = threading.Thread(target=lambda: runs.append(launch(path, wait=False)))
    button.start()
    button.join()
    assert runs[0].wait(120).ok, str(runs[0])
    assert "done" in runs[0].ranks[1].stdout


def test_launches_one_after_another_after_each_kind_of_failure(script: Callable[..., str], way: str) -> None:
    quick = """
    import os, signal, sys
    deed = sys.argv[1]
    if os.environ["RANK"] == "1":
        if deed == "raise": raise ValueError
        if deed == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if deed == "exit": sys.exit(3)
    """
    path = script(quick)
    for i in range(10 if way == "warm" else 4):
        deed = ("raise", "kill", "exit", "pass")[i % 4]
        run = launch(path, args=[deed])
        assert run.ok == (deed == "pass")
        assert run.culprit == (None if deed == "pass" else 1)


def test_what_loaders_shared_by_file_system_is_removed(script: Callable[..., str], home: Path) -> None:
    text = """
    import torch
    from torch.utils.data import DataLoader
    torch.multiprocessing.set_sharing_strategy("file_system")
    if __name__ == "__main__":
        for tensor in list(DataLoader(torch.ones(40, 100), 4, num_workers=2)):
            print(tensor.untyped_storage()._share_filename_cpu_()[1].decode())
    """
    run = launch(script(text)).check()
    files = [Path("/dev/shm") / name.lstrip("/") for rank in run.ranks for name in rank.stdout.split()]
    assert len(files) == 20 and not left_after(home, 20)
    assert not [file for file in files if file.exists()]


@pytest.mark.parametrize(
    "leaves",
    [
        "import traceback, sys; traceback.print_exc(); sys.exit(1)",
        "os._exit(1)",
        # The exception is over when the program leaves: only what was printed tells of it.
        "import logging; logging.exception('aborted'); return 1",
    ],
)
def test_a_program_that_catches_and_leaves_has_failed_by_what_it_caught(
    script: Callable[..., str], leaves: str
) -> None:
    run = launch(
        script(
            PREAMBLE
            + f"""
def read(path):
    if rank == 1: raise KeyError(path)
def main():
    try:
        read("label 40")
        dist.all_reduce(torch.ones(1))
    except Exception:
        {leaves}
import sys
sys.exit(main())
"""
        )
    )
    assert (run.culprit, run.diagnosis.name) == (1, "own_exception"), str(run)
    assert "rank 1: KeyError, line" in run.headline and "if rank == 1: raise KeyError(path)" in run.headline
    assert "caught it, and left by" in run.verdict.sentence


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
def test_a_compiled_program_that_breaks_is_told_as_any_other(home: Path) -> None:
    run = launch(str(Path(__file__).parent / "programs" / "compiled.py"), args=["--break"], stall=None)
    assert (run.state, run.culprit, run.ranks[0].words) == ("failed", 1, "lost its peer: a consequence"), str(run)
    failure = run.ranks[1].failure
    assert failure and failure.where and "model(x)" in failure.where.source
    assert "step 1" in run.ranks[1].stdout and "step 2" not in run.ranks[0].stdout
