"""Step 4: training runs in 16 bits, one that goes on, one whose rank is killed, and what trainer and profiler cost."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from step import Step, ddpkit_command, main, needs_gpu, told, watched

import ddpkit

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAM = "ddpkit.rank.training"
SIZES = (
    "--vocab-size 64 --hidden-size 32 --num-layers 2 --num-heads 2 --seq-len 16 --dataset-size 320 --batch-size 8 "
    "--num-epochs 4 --learning-rate 3e-3 --warmup-steps 4 --target-loss 0 --num-workers 1 --checkpoint-interval 4"
).split()
PROFILED = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from ddpkit.rank import CommProfiler, setup

with setup() as here:
    ddp = DDP(nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]).to(here.device), bucket_cap_mb=2)
    x = torch.randn(32, 512, device=here.device)
    with CommProfiler(ddp) as profiler:
        for _ in range(12):
            ddp.zero_grad()
            ddp(x).square().mean().backward()
    if here.rank == 0:
        print(profiler.table())
"""


def train_bf16(step: Step) -> None:
    _trained(step, "bf16", "--cpu" if step.dry else "--backend=nccl")


@needs_gpu
def train_fp16(step: Step) -> None:
    _trained(step, "fp16", "--backend=nccl")


def _trained(step: Step, precision: str, where: str) -> None:
    words = ["train", "--test", "-n", "1", "--precision", precision, where]
    code, text = ddpkit_command(step, *words, env={"COLUMNS": "160"}, limit_s=45)
    step.text("train.txt", text)
    losses = [line for line in text.splitlines() if " loss " in line]
    step.see(f"exit code {code}; {losses[-1].strip()[-120:] if losses else 'no loss was logged'}", exitcode=code)


def resume(step: Step) -> None:
    """The same training at one go, and in two parts: every weight compared, bit for bit."""
    import torch

    ran = [training(step, "whole", 24), training(step, "parts", 12), training(step, "parts", 24)]
    states = [torch.load(newest(name) / "model.pt", weights_only=True)["model_state"] for name in ("whole", "parts")]
    unequal = [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]
    ends = ", ".join(run.state for run in ran)
    went_on = ran[2].reported[0].get("resumed_from")
    same = "equal bit for bit" if not unequal else f"{len(unequal)} of {len(states[0])} tensors differ"
    step.see(f"{ends}; the second part went on from step {went_on}; weights {same}", unequal=unequal)


def training(step: Step, name: str, max_steps: int) -> ddpkit.Run:
    folders = ["--checkpoint-dir", str(step.folder / name), "--log-dir", str(step.folder / name / "logs")]
    return ddpkit.launch(PROGRAM, [*SIZES, *folders, "--max-steps", str(max_steps)], **step.one_rank(name=name))


def newest(name: str) -> Path:
    return max(Path(name).glob("step_????????"))


def killed(step: Step) -> None:
    """Rank 1 is killed in step 7; torchrun starts both again, and they go on from the last checkpoint."""
    words = [*SIZES, "--max-steps", "12", "--fault", "kill:1:7", "--checkpoint-dir", str(step.folder / "checkpoints")]
    run = ddpkit.launch(PROGRAM, words, **step.sharing(max_restarts=1, name="train", wait=False, warm=False, stall=20))
    watched(run)
    step.bundle(run, "killed")
    first = run.attempts[0] if run.attempts else ()
    ends = ", ".join(f"rank {rank.rank} {rank.words}" for rank in first)
    step.see(f"{run.state} after {len(run.attempts)} attempts; in the first: {ends}")


def trainer_cost(step: Step) -> None:
    """A step of `Trainer` against one of a bare loop, in turn, with the spread; benchmarks/trainer.py on one rank."""
    sys.path.insert(0, str(BENCHMARKS))
    import kit  # type: ignore[import-not-found]

    rounds, steps = (2, 2) if step.dry else (15, 20)
    words = ["--rounds", str(rounds), "--steps", str(steps)]
    run = ddpkit.launch(BENCHMARKS / "trainer.py", words, **step.one_rank(stall=None))
    took = run.check().reported[0]["took"]
    rows = ["| a step | ms, median | time against the bare loop (95 %) |", "|:--|--:|--:|"]
    bare = None
    for name, pairs in took.items():
        seconds = [wall for wall, _ in pairs]
        bare = bare or seconds
        rows.append(f"| {name} | {1000 * statistics.median(seconds):.2f} | {kit.said(seconds, bare)} |")
    step.text("table.md", "\n".join(rows) + "\n")
    step.see(f"{rounds} rounds of {steps} steps; the last row: {rows[-1].strip('| ')}")


def comm(step: Step) -> None:
    """Where the communication of a DDP model goes."""
    program = step.folder / "profiled.py"
    program.write_text(PROFILED, encoding="utf-8")
    run = ddpkit.launch(program, **step.sharing())
    step.text("comm.md", f"```\n{run.ranks[0].stdout.rstrip()}\n```\n")
    step.see(f"{run.state}; {told(run.ranks[0].stdout, 'ms')}")


if __name__ == "__main__":
    main(globals())
