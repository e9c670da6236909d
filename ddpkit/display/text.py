"""A run as text: the headline, the verdict, the diagnosis and a line for each rank; the same in every run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ddpkit.diagnosis.pages import page
from ddpkit.diagnosis.run import UNKNOWN, Diagnosis
from ddpkit.runfolder.frames import Frame
from ddpkit.runfolder.stable import stable

from .rows import Row
from .shown import ShownRun


def as_text(run: ShownRun) -> str:
    """The whole text form."""
    lines = [headline(run)]
    if run.revealed:
        if what_happened(run):
            lines.append(f"  {what_happened(run)}")
        if run.diagnosis:
            lines.append(f"  diagnosis: {diagnosis_line(run.diagnosis)}")
        for one in run.answers:
            lines.append(f"  {'✓' if one.right else '✗'} {one}")
    for line in text_lines(run.rows) if run.state not in ("running", "passed") else ():
        lines.append(f"  {line}")
    for note in run.notes:
        lines.append(f"  note: {note}")
    return "\n".join(lines)


def what_happened(run: ShownRun) -> str:
    """The verdict; of a job that passed with replicas that are apart, so much."""
    return run.verdict.sentence or (run.diagnosis.sentence if run.diagnosis else "")


def headline(run: ShownRun) -> str:
    """`broken → failed · 2 ranks · rank 1: ValueError, line 7: raise ValueError("boom")`."""
    state = run.state.replace("_", " ")
    if run.revealed and run.state == "timed_out" and any(row.waits for row in run.rows):
        state = "hung, and timed out"
    if run.revealed and run.replicas and run.replicas.apart:
        state += f", but the replicas are {run.replicas.apart}"
    parts = [f"{run.name} → {state}", ranks_counted(run.world_size)]
    if run.state != "running" and run.revealed and run.culprit is not None:
        parts.append(_who(run))
    return " · ".join(parts)


def _who(run: ShownRun) -> str:
    culprit = run.culprit
    named = list(culprit) if isinstance(culprit, tuple) else [culprit]
    subject = "rank " + ", ".join(map(str, named))
    if culprit == "every rank":
        subject, named = "every rank", [rank.rank for rank in run.ranks]
    first = next((row for row in run.rows if row.rank in named), None)
    if first is None:
        return f"{subject}: at fault"
    if len(named) == 1:
        subject = first.name
    failure = next(rank for rank in run.ranks if rank.rank == first.rank).failure
    words = stable(failure.type) if failure and first.message else first.words
    return f"{subject}: {words}, {first.where}" if first.where else f"{subject}: {words}"


def ranks_counted(number: int) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} rank" if number == 1 else f"{number} ranks"


def short_file(frame: Frame) -> str:
    """`train.py`, `torch/distributed/distributed_c10d.py`, or `the cell`: the same on every machine."""
    file = stable(frame.file)
    if frame.own or file == "the cell":
        return Path(file).name
    return re.sub(r"^.*/(site-packages|lib/python3\.\d+)/", "", file)


def text_lines(table: Sequence[Row]) -> list[str]:
    """The rows as aligned text."""
    width = max((len(row.words) for row in table), default=0)
    return [f"{row.name}  {row.words:<{width}}  {row.said}".rstrip() for row in table]


def diagnosis_line(diagnosis: Diagnosis) -> str:
    """`skipped_collective (certain): A rank never came …; ddpkit explain skipped_collective`."""
    if diagnosis.name == UNKNOWN:
        return f"{diagnosis.head} {diagnosis.collect}".rstrip()
    return f"{diagnosis.head}; ddpkit explain {diagnosis.name}"


def first_paragraph(diagnosis: Diagnosis) -> str:
    """The first sentences of the catalog's page, on one line, without quoted messages."""
    if diagnosis.name == UNKNOWN:
        return diagnosis.collect
    blocks = (" ".join(block.split()) for block in page(diagnosis.name).text.split("\n\n"))
    return next((re.sub(r":$", ".", block) for block in blocks if re.match(r"[A-Z`]", block)), "")
