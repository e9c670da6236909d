"""Steps 0 and 5: what the machine is, what ddpkit sees of it, NCCL's own log, and kernels that fail."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time

import psutil
from step import PROGRAMS, Step, command, ddpkit_command, main, needs_gpu, page_of, told

import ddpkit
from ddpkit.machine import devices

ASKED_OF_TORCH = """
import json, torch
nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl)),
    "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "",
    "gpus": torch.cuda.device_count(),
}))
"""
# Rank 0 waits in a collective that rank 1 never joins.
HANGS = """
import time
import torch
import torch.distributed as dist
from ddpkit.rank import setup

with setup() as here:
    if here.rank == 0:
        dist.all_reduce(torch.ones(3, device=here.device))
    while True:
        time.sleep(0.1)
"""
SAYS = """
import torch
import torch.distributed as dist
from ddpkit.rank import setup

with setup() as here:
    dist.all_reduce(torch.ones(1 << 20, device=here.device))
"""


def versions(step: Step) -> None:
    """What every recording is labelled with."""
    code, text = command(step, sys.executable, "-c", ASKED_OF_TORCH, limit_s=25)
    assert code == 0, text
    found = {"python": platform.python_version(), **json.loads(text.splitlines()[-1])}
    found["driver"] = devices.driver_version()
    found["cores"], found["memory_gib"] = os.cpu_count(), round(psutil.virtual_memory().total / 2**30)
    found["shm_gib"] = round(shutil.disk_usage("/dev/shm").total / 2**30, 1)
    found["interfaces"] = sorted(name for name, state in psutil.net_if_stats().items() if state.isup)
    if shutil.which("nvidia-smi"):
        _, said = command(step, "nvidia-smi", "-q", "-d", "COMPUTE", limit_s=10)
        found["compute_mode"] = told(said, "Compute Mode").rpartition(":")[2].strip()
    step.see(f"{found['gpu'] or 'no GPU'}, torch {found['torch']}, NCCL {found['nccl'] or 'none'}", **found)


def stack(step: Step) -> None:
    """Whether a rank that hangs can be looked at here: by py-spy, and in torch's flight recorder."""
    program = step.folder / "hangs.py"
    program.write_text(HANGS, encoding="utf-8")
    run = ddpkit.launch(program, backend="gloo", show=False, timeout=25, stall=2, stop_on_stall=True)
    step.text("run.txt", f"{run}\n\n{run.ranks[0].stack}")
    at = run.ranks[0].at
    step.see(f"{run.state}; rank 0 at {at.text if at else 'no line'}; {run.started}; {run.verdict.sentence}")
    assert run.state == "hung" and at is not None, str(run)


def doctor(step: Step) -> None:
    code, text = ddpkit_command(step, "doctor", env={"COLUMNS": "160"})
    step.text("doctor.txt", text)
    step.see(f"exit code {code}; {text.strip().splitlines()[-1]}", exitcode=code)


def live_memory(step: Step) -> None:
    """The GPU memory of each rank as the live view asks for it: each holds 1 GiB."""
    run = ddpkit.launch(PROGRAMS / "holds.py", ["4"], **step.sharing(wait=False))
    most: dict[int, float] = {}
    while run.state == "running":
        by_pid = devices.device_mib([rank.pid for rank in run.ranks])
        for rank in run.ranks:
            if rank.pid in by_pid:
                most[rank.rank] = max(most.get(rank.rank, 0.0), by_pid[rank.pid][1])
        time.sleep(0.2)
    held = ", ".join(f"rank {rank} {mib:.0f} MiB" for rank, mib in sorted(most.items()))
    step.see(f"{run.wait().state}; on the GPU: {held or 'nothing'}", mib=most)


def nccl_debug(step: Step) -> None:
    """What NCCL says of a healthy job, all ranks in one file."""
    program = step.folder / "says.py"
    program.write_text(SAYS, encoding="utf-8")
    run = ddpkit.launch(program, **step.sharing(env={"NCCL_DEBUG": "INFO"}))
    text = "".join(rank.stdout + rank.stderr for rank in run.ranks)
    step.log("nccl_debug_info", text)
    kinds = {line.partition("NCCL INFO ")[2].partition(" ")[0] for line in text.splitlines() if "NCCL INFO " in line}
    step.see(f"{run.state}; {len(text.splitlines())} lines of NCCL, of {len(kinds)} kinds")


@needs_gpu
def device_side_assert(step: Step) -> None:
    _kernel_fails(step, "device_assert")


@needs_gpu
def cuda_kernel_error(step: Step) -> None:
    _kernel_fails(step, "illegal_access")


def _kernel_fails(step: Step, case: str) -> None:
    """With each kernel waited for the traceback is true; without, it names a later line."""
    said = []
    for name, env in ((step.name, {}), (f"{step.name}_blocking", {"CUDA_LAUNCH_BLOCKING": "1"})):
        run = ddpkit.launch(PROGRAMS / "device_faults.py", [case], **step.one_rank(env=env, name=step.name))
        step.log(name, run.ranks[0].stderr)
        if not env:
            step.bundle(run, step.name)
        failure = run.ranks[0].failure
        said.append(f"{run.state}, {page_of(run)}, {failure.line_text if failure else 'no line'}")
    step.see(f"{said[0]}; with CUDA_LAUNCH_BLOCKING=1: {said[1]}")


if __name__ == "__main__":
    main(globals())
