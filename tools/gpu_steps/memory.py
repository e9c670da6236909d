"""Step 3: memory that runs out for real: the text, each remedy with its peak, CUDA's snapshot, and the whole GPU filled."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from step import PROGRAMS, Step, command, main, needs_gpu, page_of, told

import ddpkit
from ddpkit.course.lab import Lab, Remedy, lab, patched
from ddpkit.runfolder import wire

LAB = "out_of_memory_cpu"
# The lab's 80 MiB are for a CPU. On a GPU its kernels alone take some 30 MiB, so budget and clouds are larger there.
TIMES = 8
ABREAST = 4
IN_DRY_RUN = ("more_memory", "half_batch", "checkpoint")


def memory_remedies(step: Step) -> None:
    """The lab's program on one rank as it is, and with each remedy: how it ends, and its peak."""
    found = lab(LAB)
    broken = wait_all([started(step, found, None)])[0]
    step.bundle(broken, "out_of_memory_cpu" if step.dry else "out_of_memory_cuda")
    step.log("out_of_memory_cuda", broken.ranks[0].stderr)
    step.see(f"{broken.state}, {page_of(broken)}: {told(broken.ranks[0].stderr, 'out of memory', 'allocate')}")
    chosen = [r for r in found.remedies if not step.dry or r.name in IN_DRY_RUN]
    runs = []
    for first in range(0, len(chosen), ABREAST):
        runs += wait_all([started(step, found, remedy) for remedy in chosen[first : first + ABREAST]])
    rows = [row("as it is", broken), *(row(r.title, run) for r, run in zip(chosen, runs, strict=True))]
    head = "| remedy | the job | peak, MiB | budget, MiB |\n|:--|:--|--:|--:|"
    step.text("table.md", "\n".join([head, *rows]) + "\n")
    passed = sum(run.ok for run in runs)
    step.see(f"as it is: {broken.state}, {page_of(broken)}; {passed} of {len(runs)} remedies pass")


def started(step: Step, found: Lab, remedy: Remedy | None) -> ddpkit.Run:
    """A job of the lab's program, with all of its sizes larger where it has a GPU; one rank takes the share of two."""
    script = patched(found.program, remedy.edits if remedy else ())
    times = 1 if step.dry else TIMES
    script = re.sub(r"memory_budget\((\d+)\)", lambda m: f"memory_budget({int(m[1]) * times})", script)
    # One rank has the clouds of both.
    script = re.sub(r"default=(\d+)", lambda m: f"default={int(m[1]) * times // 2}", script)
    name = remedy.name if remedy else "as_it_is"
    program = Path(f"{name}.py")
    program.write_text(script, encoding="utf-8")
    env = dict(remedy.env or {}) if remedy else {}
    return ddpkit.launch(program, **step.one_rank(name=name, env=env, stall=30, wait=False))


def wait_all(runs: list[ddpkit.Run]) -> list[ddpkit.Run]:
    return [run.wait() for run in runs]


def row(title: str, run: ddpkit.Run) -> str:
    """A line of the table, with what the rank wrote down of its memory."""
    lines = wire.read_text(run.ranks[0].folder / wire.MEMORY).splitlines() if run.ranks else []
    last = json.loads(lines[-1]) if lines else {"peak_mib": 0, "budget_mib": None}
    budget = f"{last['budget_mib']:.0f}" if last["budget_mib"] else "none"
    return f"| {title} | {run.state if run.ok else page_of(run)} | {last['peak_mib']:.0f} | {budget} |"


def memory_two(step: Step) -> None:
    """Two processes on one GPU: the text then tells how much the other one has."""
    program = Path("beside.py")
    program.write_text(lab(LAB).program, encoding="utf-8")
    run = ddpkit.launch(program, ["--num_points", str(2048 * (1 if step.dry else TIMES))], **step.sharing())
    text = "".join(rank.stderr for rank in run.ranks)
    step.log("out_of_memory_beside_another", text)
    step.see(f"{run.state}, {page_of(run)}: {told(text, 'out of memory', 'allocate')}")


@needs_gpu
def memory_snapshot(step: Step) -> None:
    """A share of the GPU filled, with CUDA's snapshot; once more in segments that can grow."""
    plain = _cuda(step, "snapshot", "memory_snapshot", {})
    grows = _cuda(step, "snapshot", "memory_expandable", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    step.see(f"{plain}; with expandable segments: {grows}")


@needs_gpu
def memory_real(step: Step) -> None:
    """Nothing else may need the GPU meanwhile."""
    step.see(_cuda(step, "fill", "memory_full", {}))


def _cuda(step: Step, case: str, name: str, env: dict[str, str]) -> str:
    code, text = command(step, sys.executable, str(PROGRAMS / "device_faults.py"), case, env=env, limit_s=20)
    step.log(name, text)
    return f"exit code {code}, {told(text, 'CUDA out of memory')}"


if __name__ == "__main__":
    main(globals())
