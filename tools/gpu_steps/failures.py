"""Step 2: two NCCL ranks on one GPU under ddpkit: labs of the catalog as they are, an exception, and a rank that is killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from step import PROGRAMS, WATCHDOG, Step, command, main, page_of, told, torchrun, watched

import ddpkit
from ddpkit.course.lab import lab

# What is tried in turn where two ranks do not get through a healthy job: without channels that run side by side.
SPARING = {"NCCL_MAX_NCHANNELS": "1"}


def healthy(step: Step) -> None:
    """Whether two ranks on one GPU work at all, and by which settings; the steps after this one go by it."""
    more: dict[str, str] = {}
    for more in ({}, SPARING):
        code, text = torchrun(
            step,
            2,
            str(PROGRAMS / "pair.py"),
            "healthy",
            env={**shared(step), **more, "NCCL_DEBUG": "INFO"},
            limit_s=35,
        )
        step.log("healthy_two_ranks", text)
        if code == 0:
            break
    words = " ".join(f"{name}={value}" for name, value in more.items()) or "nothing more"
    figures = told(text, "all_reduce_ms")
    step.see(f"exit code {code}, with {words}; {figures}", exitcode=code, settings=more)
    assert code == 0, text[-2000:]


def shared(step: Step) -> dict[str, str]:
    """The environment in which plain ranks share a GPU; that of `launch(share_gpu=True)` in other words."""
    from ddpkit.launcher.options import SHARED_GPU

    return {} if step.dry else {"HOST_PER_RANK": "1", **SHARED_GPU}


def a_lab(step: Step) -> None:
    """The lab that the step is named after, word for word, under a timeout that `setup()` reads."""
    program = Path(f"{step.name}.py")
    program.write_text(lab(step.name).program, encoding="utf-8")
    seen(step, ddpkit.launch(program, **options(step)))


def skipped_collective(step: Step) -> None:
    """The lab, and then what torch's own reader makes of the dump."""
    a_lab(step)
    if not step.dry:
        read_dumps(step)


def own_exception(step: Step) -> None:
    """A label that nobody knows comes to one rank."""
    seen(step, ddpkit.launch(PROGRAMS / "labels.py", **options(step)))


def peer_lost(step: Step) -> None:
    """A rank is killed from outside, as the kernel does when the memory is gone."""
    run = ddpkit.launch(PROGRAMS / "labels.py", ["--good"], **options(step, name="peer_lost"))
    until = time.monotonic() + 30
    while time.monotonic() < until and not (len(run.ranks) == 2 and "step 20" in run.ranks[1].stdout):
        time.sleep(0.05)
    if pid := run.ranks[1].pid:
        os.kill(pid, signal.SIGKILL)
    seen(step, run)


def options(step: Step, **more: Any) -> dict[str, Any]:
    """How each job of this step is launched."""
    env = {
        "TORCH_DIST_TIMEOUT": str(step.timeout_s),
        "TORCH_FR_DUMP_TEMP_FILE": str(step.folder / "trace_"),
        **WATCHDOG,
    }
    return step.sharing(env=env, wait=False, warm=False, **more)


def seen(step: Step, run: ddpkit.Run) -> None:
    """Wait for the end; verdict, page, seconds and bundle."""
    began = time.monotonic()
    named_s = watched(run)
    took_s = round(time.monotonic() - began, 1)
    step.bundle(run, step.name)
    for rank in run.ranks:
        step.text(f"rank_{rank.rank}_stderr.txt", rank.stderr)
    said = f"{run.state}, {page_of(run)}; at fault: {run.culprit}, named after {named_s:.0f} of {took_s:.0f} s"
    step.see(
        f"{said}. {run.verdict.sentence}",
        state=run.state, culprit=run.culprit, page=page_of(run), named_s=named_s, took_s=took_s,
    )  # fmt: skip


def read_dumps(step: Step) -> None:
    """What torchfrtrace says of the ranks' dumps, in the ways in which a reader calls it."""
    reader = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(step.folder), "-p", "trace_"]
    for name, words in (("plain", []), ("joined", ["-j"]), ("incomplete", ["--allow-incomplete-ranks"])):
        code, text = command(step, *reader, *words, limit_s=30)
        step.text(f"torchfrtrace_{name}.txt", f"exit code {code}\n{text}")


metric_meets_bucket = unused_parameters = branch_by_rank = early_exit = loader_worker_killed = a_lab

if __name__ == "__main__":
    main(globals())
