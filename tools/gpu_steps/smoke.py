"""Step 1: the smallest communication test on NCCL, with one rank, with two on one GPU, and NCCL's own refusal of that."""

from __future__ import annotations

import os
import time
from pathlib import Path

from step import PROGRAMS, Step, ddpkit_command, main, torchrun

import ddpkit
from ddpkit.machine import devices
from ddpkit.processes import zygote

PAIR, HOLDS = str(PROGRAMS / "pair.py"), PROGRAMS / "holds.py"


def smoke_one(step: Step) -> None:
    _smoke(step, "-n", "1", "--backend", "gloo" if step.dry else "nccl")


def smoke_shared(step: Step) -> None:
    _smoke(step, "-n", "2", *(["--backend", "gloo"] if step.dry else ["--share-gpu"]))


def _smoke(step: Step, *words: str) -> None:
    code, text = ddpkit_command(step, "smoke", *words, env={"COLUMNS": "160"})
    step.text("smoke.txt", text)
    lines = text.strip().splitlines()
    passed = [line for line in lines if "/6] " in line]
    step.see(f"exit code {code}; {(passed or lines)[-1].strip()}", exitcode=code)


def two_by_torchrun(step: Step) -> None:
    """What NCCL says by itself."""
    code, text = torchrun(step, 2, PAIR, "healthy", env={"NCCL_DEBUG": "WARN"}, limit_s=35)
    step.log("duplicate_gpu", text)
    said = [line.strip() for line in text.splitlines() if "GPU detected" in line or "same GPU" in line]
    found = ddpkit.diagnose(step.folder / "duplicate_gpu.log")
    step.see(
        f"exit code {code}; {said[0][:160] if said else 'no refusal'}; ddpkit diagnose: {found.name}", exitcode=code
    )


def two_refused(step: Step) -> None:
    """What ddpkit says before anything is started."""
    code, text = ddpkit_command(step, "smoke", "-n", "2", "--backend", "nccl", limit_s=15)
    step.text("refused.txt", text)
    step.see(f"exit code {code}; {text.strip().splitlines()[-1]}", exitcode=code)


def warm_process(step: Step) -> None:
    """The warm process must not open the GPU: no fork could use it then."""
    ddpkit.launch(HOLDS, ["0"], **step.one_rank())
    run = ddpkit.launch(HOLDS, ["3"], **step.one_rank(wait=False))
    while run.state == "running" and not (run.ranks and "holds" in run.ranks[0].stdout):
        time.sleep(0.05)
    warm = zygote._current
    pids = {"warm process": warm.pid if warm else None, "rank": run.ranks[0].pid if run.ranks else None}
    on_gpu = [name for name, pid in pids.items() if pid in devices.device_mib([pid])]
    opened = _gpu_files(pids["warm process"])
    run.wait()
    step.see(f"{run.started}; on the GPU: {', '.join(on_gpu) or 'nobody'}; GPU files open: {len(opened)}", files=opened)
    assert run.ok, str(run)
    assert run.warm and not opened and "warm process" not in on_gpu, f"{run.started}, {opened}, {on_gpu}"


def _gpu_files(pid: int | None) -> list[str]:
    folder = Path(f"/proc/{pid}/fd")
    targets = [os.path.realpath(file) for file in folder.iterdir()] if pid else []
    return [target for target in targets if target.startswith("/dev/nvidia")]


if __name__ == "__main__":
    main(globals())
