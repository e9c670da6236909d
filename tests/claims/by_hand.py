"""Tries a remedy as a reader would by hand: the lab's program with the remedy's edits in a file, under plain torchrun.

`python tests/claims/by_hand.py LAB[/REMEDY[+REMEDY]] ...` prints for each: the exit code, or that it was still running
after 45 s; how far the ranks' parameters are apart at the end; and how far they are from those of one process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import torch

from ddpkit.course.lab import Lab, lab, patched

PATIENCE_S = 45
# At the end of the program's last block, which may hold the process group.
KEEP = """
import os as _os
_module = globals().get("ddp") or globals().get("net") or globals().get("model")
torch.save(getattr(_module, "module", _module).state_dict(), f"{_os.environ['OUT']}/{_os.environ['RANK']}.pt")
"""
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


def run(text: str, ranks: int, env: dict[str, str]) -> tuple[str, list[dict[str, torch.Tensor]], str]:
    """How the program ends, what each rank held then, and what all of them wrote."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "train.py")
        in_block = "    " if text.rstrip().splitlines()[-1].startswith(" ") else ""
        program.write_text(text.rstrip() + textwrap.indent(KEEP, in_block))
        command = [TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), str(program)]
        job = subprocess.Popen(
            command, env={**os.environ, **env, "OUT": folder}, cwd=folder, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said = job.communicate(timeout=PATIENCE_S)[0]
            ended = f"exit code {job.returncode}"
        except subprocess.TimeoutExpired:
            job.terminate()
            said = job.communicate()[0]
            ended = f"still running after {PATIENCE_S} s"
        held = [torch.load(file) for file in sorted(Path(folder).glob("?.pt"))]
    return ended, held, said


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of any parameter, and of the names that one of them lacks: infinity."""
    if one.keys() != other.keys():
        return float("inf")
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def one_process(of: Lab) -> dict[str, torch.Tensor]:
    """What the training without the fault holds at the end in a single process."""
    plain = of.remedy(of.plain)
    _, held, _ = run(patched(of.program, [*plain.edits, *of.reference]), 1, {**(of.env or {}), **(plain.env or {})})
    return held[0]


def tried(name: str) -> str:
    """The line about `lab/remedy`."""
    of, _, names = name.partition("/")
    found = lab(of)
    remedies = [found.remedy(one) for one in names.split("+") if one]
    env = {**(found.env or {})}
    for remedy in remedies:
        env |= remedy.env or {}
    ended, held, said = run(patched(found.program, [e for r in remedies for e in r.edits]), found.nproc, env)
    words = [ended]
    if len(held) == found.nproc:
        words.append(f"replicas {apart(held[0], held[-1]):.1e} apart")
        if all(remedy.keeps for remedy in remedies):
            words.append(f"{apart(held[0], one_process(found)):.1e} off one process")
    telling = [line for line in said.splitlines() if "Error: " in line or "Signal " in line]
    errors = dict.fromkeys(line.split("]: ")[-1].strip()[:110] for line in telling)
    return f"{name}: {', '.join(words)}" + "".join(f"\n    {error}" for error in errors)


if __name__ == "__main__":
    for asked in sys.argv[1:]:
        print(tried(asked), flush=True)
