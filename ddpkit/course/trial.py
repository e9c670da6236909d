"""Runs a lab's script with some remedies, and says what came of it: measured, in words, and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Any

from ddpkit.display.html import table_row
from ddpkit.display.rows import Row
from ddpkit.display.sink import Sink
from ddpkit.errors import LaunchError
from ddpkit.launcher.launcher import start
from ddpkit.launcher.options import checked_options
from ddpkit.launcher.target import of_text
from ddpkit.run import Run
from ddpkit.runfolder import steps, wire

from .lab import Lab, Remedy, patched

PREDICTIONS = ("cures", "fails", "hangs", "passes but wrong", "passes but slow")


def predictions(lab: Lab) -> tuple[str, ...]:
    """What can be predicted of a remedy: that a job stays slow only where the lab is about one."""
    return PREDICTIONS if lab.expect == "slow" else PREDICTIONS[:-1]


@dataclass(frozen=True)
class Outcome:
    """What came of one run. Distances are the largest difference of any value, in units of the largest value above 1.

    `replicas_apart`: between ranks, at the end. `off_one_process`: from the same training in one process, where that is
    `comparable`: not where the remedy changes the training, nor for a job that did not pass.
    """

    run: Run
    replicas_apart: float | None
    off_one_process: float | None
    comparable: bool

    @property
    def cures(self) -> bool:
        """Whether the job passed and is not slow, with equal replicas, and as one process, where that is comparable."""
        return self.ends == "cures"

    @property
    def ends(self) -> str:
        """cures, fails, hangs, stopped, wrong, or slow: by its own report a job wastes more than half of its steps."""
        if not self.run.ok:
            return {"failed": "fails", "stopped": "stopped"}.get(self.run.state, "hangs")
        equal = steps.equal(self.replicas_apart) or any(r.sharded for r in steps.recorded(self.run.ranks))
        if not equal or (self.comparable and not steps.equal(self.off_one_process)):
            return "wrong"
        return "slow" if any(told.get("wasted", 0) > 0.5 for told in self.run.reported.values()) else "cures"

    @property
    def words(self) -> str:
        """The verdict in a few words, the same in every run."""
        if self.ends in ("fails", "hangs"):
            return f"{self.ends}{_who(self.run)}"
        return f"passes, and {self.compared}" if self.ends in ("wrong", "slow") else self.ends

    @property
    def compared(self) -> str:
        """What the comparison of a job that passed has found."""
        if float("inf") in (self.replicas_apart, self.off_one_process):
            return "values are not finite"
        if self.replicas_apart is not None and not steps.equal(self.replicas_apart):
            return f"the replicas are {self.replicas_apart:.2g} apart"
        if self.off_one_process is not None and not steps.equal(self.off_one_process):
            return f"the result is {self.off_one_process:.2g} off what one process computes"
        if self.ends in ("wrong", "slow"):
            return "more than half of each step is wasted" if self.ends == "slow" else "there is nothing to compare"
        if self.replicas_apart is None:
            return "the result is that of one process" if self.comparable else "each rank holds its own shard"
        return "the replicas are equal to each other" + (" and to one process" if self.comparable else "")

    @property
    def evidence(self) -> str:
        """What decides: exit codes and comparison of a job that passed, else what the ranks did."""
        if self.run.ok:
            return f"exit codes {_codes(self.run)}, and {self.compared}"
        # A rank that was told to end shows its fault only beside what the others did.
        by_itself = {rank.rank for rank in self.run.ranks if not rank.told and self.ends == "fails"}
        at_fault = [row for row in self.run.rows if row.tone == "fault" and row.rank in by_itself]
        return _did(at_fault or self.run.rows, self.run.world_size)


def _who(run: Run) -> str:
    """` · rank 1: ValueError`: who is at fault, and the exception or signal it ended with by itself."""
    if run.culprit is None:
        return ""
    at_fault = run.culprit if isinstance(run.culprit, tuple) else (run.culprit,)
    named = [r for r in run.ranks if run.culprit == "every rank" or r.rank in at_fault]
    subject = "every rank" if run.culprit == "every rank" else "rank " + ", ".join(str(r.rank) for r in named)
    ended = {r.failure.type if r.failure else r.signal for r in named if not r.told and (r.failure or r.signal)}
    return f" · {subject}: {ended.pop()}" if len(ended) == 1 else f" · {subject}"


def _codes(run: Run) -> str:
    return " ".join(str(rank.exitcode) for rank in run.ranks)


def _did(rows: Sequence[Row], nproc: int) -> str:
    """`rank 0 waits in all_reduce #10, line 17: loss.backward(); rank 1 computes, line 43: x.sum()`; like ranks together."""
    by_words: dict[str, list[str]] = {}
    for row in rows:
        # Where a rank was when it lost its peer is chance.
        where = "" if row.words.endswith("a consequence") else row.where
        by_words.setdefault(", ".join(filter(None, (row.words, where))), []).append(str(row.rank))
    if nproc > 1 and [len(ranks) for ranks in by_words.values()] == [nproc]:
        return f"every rank {next(iter(by_words))}"
    said = [f"rank {', '.join(r)}{':' if r[1:] else ''} {words}" for words, r in by_words.items()]
    return "; ".join(said) or "no rank was started"


@dataclass(frozen=True, repr=False)
class Result:
    """One run on the bench. `predicted`: one of `PREDICTIONS`, or "" for nothing; `why`: the reasons of its remedies."""

    tried: str
    predicted: str
    outcome: Outcome
    why: str = ""

    @property
    def run(self) -> Run:
        """The run itself, with its ranks, culprit and diagnosis."""
        return self.outcome.run

    @property
    def cures(self) -> bool:
        """Whether it cured; see `Outcome.cures`."""
        return self.outcome.cures

    @property
    def apart_by_step(self) -> list[float]:
        """How far the ranks' parameters were apart after each step that all of them applied, also in a job that failed."""
        return [round(apart, 6) for apart in steps.apart_by_step(self.run.ranks)]

    @property
    def came(self) -> str:
        """How it ended, in the words of a prediction, or "stopped"."""
        return f"passes but {self.outcome.ends}" if self.outcome.ends in ("wrong", "slow") else self.outcome.ends

    @property
    def response(self) -> str:
        """Whether the prediction was right, with the evidence that decides; "" where nothing was predicted."""
        if not self.predicted or self.came == "stopped":
            return self.predicted and "It was stopped before it could tell."
        said, came = (words.replace("but ", "but is ") for words in (self.predicted, self.came))
        head = f"As you said, it {came}" if said == came else f"You said it {said}; it {came}"
        return f"{head}: {self.outcome.evidence}."

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of its row of the table, the same in every run."""
        found = self.outcome
        return (
            self.tried,
            self.predicted or "–",
            self.came,
            _said(found.replicas_apart),
            _said(found.off_one_process) if found.comparable or not self.run.ok else "not compared",
            f"exit codes {_codes(self.run)}" if self.run.ok else _did(self.run.rows, self.run.world_size),
        )

    def __repr__(self) -> str:
        return "\n".join(filter(None, (f"{self.tried} → {self.outcome.words}", self.response)))


class Results(tuple[Result, ...]):
    """The results of a bench, oldest first; shown as a table that holds nothing that varies from run to run.

    As the last expression of a cell it shows the rows that no cell has shown yet; `print` shows all.
    """

    TITLES = ("remedy", "you said", "outcome", "replicas", "as one process", "each rank")
    # How many of them were shown: one number, shared with the bench.
    shown: list[int]

    def _ipython_display_(self) -> None:
        from IPython.display import display

        new = Results(self[self.shown[0] :] or self)
        self.shown[0] = len(self)
        # Of a tuple IPython would take the text from its repr.
        display({"text/plain": repr(new), "text/html": new.html}, raw=True)

    def __repr__(self) -> str:
        rows = [self.TITLES, *(r.cells for r in self)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.TITLES))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    @property
    def html(self) -> str:
        """The table as HTML."""
        body = "".join(table_row(map(escape, result.cells)) for result in self)
        return f"<table><thead>{table_row(self.TITLES, 'th')}</thead><tbody>{body}</tbody></table>"


def _said(difference: float | None) -> str:
    if difference is None:
        return "–"
    if steps.equal(difference):
        return "equal"
    return f"{difference:.2g} off" if difference < float("inf") else "not finite"


@dataclass
class Trials:
    """The runs of one script: the plain one and the one in a single process are made when first needed, and kept.

    `script` is the text that the remedies edit: the lab's own, or the reader's. `env` are the variables around it, by
    default the lab's.
    """

    lab: Lab
    script: str
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str | None] | None = None

    def run(
        self,
        remedies: Sequence[Remedy] = (),
        script: str | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Run:
        """Launch the script with `remedies`, or the text `script` instead; `options` go before the lab's own limits."""
        text = (
            patched(self.script, [e for r in remedies for e in r.edits_for(self.script)]) if script is None else script
        )
        around = (self.lab.env or {}) if self.env is None else self.env
        settings = {**around, **{k: v for r in remedies for k, v in (r.env or {}).items()}, **(env or {})}
        name = "_".join([self.lab.name, *(r.name for r in remedies)])
        size = {"nproc": self.lab.nproc, "nnodes": self.lab.nnodes}
        limits = {"timeout": self.lab.timeout, "stall": self.lab.stall}
        return run_recorded(text, env=settings, **{"name": name, **size, **limits, **self.options, **options})

    def outcome(self, run: Run, keeps: bool = True) -> Outcome:
        """What came of `run`; `keeps`: whether it trains as the plain script does."""
        comparable = keeps and run.ok and self.reference is not None
        off = steps.off_one_process(run.ranks, self.reference.ranks) if comparable and self.reference else None
        return Outcome(run, steps.replicas_apart(run.ranks), off, comparable)

    @cached_property
    def reference(self) -> Run | None:
        """The plain training in one process, on the same global batch; None where it cannot be made of the reader's script."""
        if not self.lab.plain or not self.lab.written_as(self.script):
            return None
        plain = self.lab.remedy(self.lab.plain)
        try:
            script = patched(self.script, [*plain.edits, *self.lab.reference])
        except LaunchError:
            return None
        run = self.run([plain], script=script, nproc=1, nnodes=1, name=f"{self.lab.name}_one_process")
        return run if run.ok else None


def run_recorded(
    script: str,
    name: str,
    env: Mapping[str, str | None],
    wait: bool = True,
    show: bool | str | Sink = False,
    args: Sequence[str] = (),
    path_folder: str | None = None,
    **options: Any,
) -> Run:
    """Launch `script`, a text; every step's parameters and gradients are written down, and a hang ends at its stall."""
    checked = checked_options(env={**env, wire.ENV_STEPS: "1"}, name=name, stop_on_stall=True, **options)
    return start(of_text(script, name, args, path_folder=path_folder), checked, wait=wait, show=show, patient=True)
