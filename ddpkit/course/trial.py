"""Runs a lab's script with some remedies, and measures what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ddpkit.display.sink import Sink
from ddpkit.errors import LaunchError
from ddpkit.launcher.launcher import start
from ddpkit.launcher.options import checked_options
from ddpkit.launcher.target import of_text
from ddpkit.run import Run
from ddpkit.runfolder import steps, wire

from .lab import Lab, Remedy, patched


@dataclass(frozen=True)
class Outcome:
    """What came of one run. Distances are the largest difference of any value, in units of the largest value above 1.

    `replicas_apart`: between ranks, at the end. `off_one_process`: from the same training in one process, where that is
    `comparable`: not where the remedy changes the training, nor for a job that did not pass. `step` and `plain_step`: how
    long a step took, here and in the plain run.
    """

    run: Run
    replicas_apart: float | None
    off_one_process: float | None
    comparable: bool
    step: steps.StepTime | None = None
    plain_step: steps.StepTime | None = None

    @property
    def cures(self) -> bool:
        """Whether the job passed, its replicas are equal, and so is the result of one process, where that is comparable."""
        if not self.run.ok or (self.comparable and not steps.equal(self.off_one_process)):
            return False
        if self.replicas_apart is None:
            return any(record.sharded for record in steps.recorded(self.run.ranks))
        return steps.equal(self.replicas_apart)

    @property
    def step_ratio(self) -> float | None:
        """The time of a step against the plain run's, of medians; None where either is not known."""
        return self.step.median / self.plain_step.median if self.step and self.plain_step else None

    @property
    def step_words(self) -> str:
        """`1.7×`; `≈ 1×` where the middle halves of the steps' times overlap; `–` where it is not known."""
        if not self.step or not self.plain_step or self.step_ratio is None:
            return "–"
        return "≈ 1×" if self.step.overlaps(self.plain_step) else f"{self.step_ratio:.2g}×"

    @property
    def ends(self) -> str:
        """cures, fails, hangs, stopped or wrong: a job that passes and is not right."""
        if self.cures:
            return "cures"
        return {"failed": "fails", "passed": "wrong", "stopped": "stopped"}.get(self.run.state, "hangs")

    @property
    def words(self) -> str:
        """The verdict in a few words, the same in every run."""
        if self.ends in ("fails", "hangs"):
            return f"{self.ends}{_who(self.run)}"
        if self.ends != "wrong":
            return self.ends
        if float("inf") in (self.replicas_apart, self.off_one_process):
            return "passes, and values are not finite"
        if self.replicas_apart is not None and not steps.equal(self.replicas_apart):
            return f"passes, and the replicas are {self.replicas_apart:.2g} apart"
        if self.off_one_process is not None and not steps.equal(self.off_one_process):
            return f"passes, and is {self.off_one_process:.2g} off what one process computes"
        return "passes, with nothing to compare"


def _who(run: Run) -> str:
    """` · rank 1: ValueError`: who is at fault, and the exception or signal it ended with by itself."""
    if run.culprit is None:
        return ""
    at_fault = run.culprit if isinstance(run.culprit, tuple) else (run.culprit,)
    named = [r for r in run.ranks if run.culprit == "every rank" or r.rank in at_fault]
    subject = "every rank" if run.culprit == "every rank" else "rank " + ", ".join(str(r.rank) for r in named)
    ended = {r.failure.type if r.failure else r.signal for r in named if not r.told and (r.failure or r.signal)}
    return f" · {subject}: {ended.pop()}" if len(ended) == 1 else f" · {subject}"


@dataclass
class Trials:
    """The runs of one script: the plain one and the one in a single process are made when first needed, and kept.

    `script` is the text that the remedies edit: the lab's own, or the reader's.
    """

    lab: Lab
    script: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(
        self,
        remedies: Sequence[Remedy] = (),
        script: str | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Run:
        """Launch the script with `remedies`, or the text `script` instead; `options` go before the lab's own limits."""
        text = patched(self.script, [e for r in remedies for e in r.edits]) if script is None else script
        settings = {**(self.lab.env or {}), **{k: v for r in remedies for k, v in (r.env or {}).items()}, **(env or {})}
        name = "_".join([self.lab.name, *(r.name for r in remedies)])
        limits = {"nproc": self.lab.nproc, "timeout": self.lab.timeout, "stall": self.lab.stall}
        return run_recorded(text, env=settings, **{"name": name, **limits, **self.options, **options})

    def outcome(self, run: Run, keeps: bool = True) -> Outcome:
        """What came of `run`; `keeps`: whether it trains as the plain script does."""
        comparable = keeps and run.ok and self.reference is not None
        off = steps.off_one_process(run.ranks, self.reference.ranks) if comparable and self.reference else None
        took = steps.step_time(run.ranks) if run.ok else None
        return Outcome(run, steps.replicas_apart(run.ranks), off, comparable, took, self.plain_step if took else None)

    @cached_property
    def reference(self) -> Run | None:
        """The plain training in one process, on the same global batch; None where it cannot be made of the reader's script."""
        return self._passed(self.lab.reference, nproc=1, name=f"{self.lab.name}_one_process")

    @cached_property
    def plain_step(self) -> steps.StepTime | None:
        """How long a step of the plain training takes on the lab's own number of ranks."""
        plain = self._passed(())
        return steps.step_time(plain.ranks) if plain else None

    def _passed(self, edits: Sequence[tuple[str, str]], **options: Any) -> Run | None:
        plain = self.lab.remedy(self.lab.plain)
        try:
            script = patched(self.script, [*plain.edits, *edits])
        except LaunchError:
            return None
        run = self.run([plain], script=script, **options)
        return run if run.ok else None


def run_recorded(
    script: str, name: str, env: Mapping[str, str], wait: bool = True, show: bool | str | Sink = False, **options: Any
) -> Run:
    """Launch `script`, a text; every step's parameters and gradients are written down, and a hang ends at its stall."""
    checked = checked_options(env={**env, wire.ENV_STEPS: "1"}, name=name, stop_on_stall=True, **options)
    return start(of_text(script, name), checked, wait=wait, show=show, patient=True)
