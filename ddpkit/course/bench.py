"""`FixBench`: a failure on the bench, from the catalog or from the reader's own run: remedies are chosen, run and compared.

Every button of its view, `bench_view.py`, calls a method of this class; it works without the view as well.
"""

from __future__ import annotations

import difflib
import os
import random
import threading
from collections.abc import Mapping
from html import escape
from typing import Any

from ddpkit.diagnosis.run import UNKNOWN
from ddpkit.display.notebook import widget_bundle
from ddpkit.display.picture import Picture
from ddpkit.display.sink import Sink
from ddpkit.errors import LaunchError
from ddpkit.run import Run
from ddpkit.runfolder import wire

from . import comparison
from .answer import PREDICTED, Answer, Question, given_for
from .exercises import seed
from .lab import Lab, Remedy, fits, lab, lab_for, patched
from .trial import PREDICTIONS, Outcome, Result, Results, Trials, predictions

NOTHING, OWN, RECORDED = "as it is", "your own edit", "as it is, recorded on Linux"


class FixBench:
    """A failure and its remedies. Shown as the last expression of a cell it is a set of controls; `run()` does the same.

    Args:
        subject: the name of a lab of the catalog, or a run of your own; then its script is what the remedies edit, with
            your edits in it, and its arguments, variables, ranks, limits and working directory stay. A remedy that finds
            no place in it leaves that to an edit of your own.
        lab: which lab's remedies to offer for a run; by default that of its diagnosis.
        options: further options of `launch`, such as nproc=4 or timeout=120.

    `remedies` are the lab's, shuffled: always in the same order for the same reader. `title` names the run, and the
    cause only when a remedy has cured. `given` says what came along from the reader's run. `fault` is the number of the
    script's line at fault, and what happened there; None where there is no such line, or it is not revealed yet. Where
    the failure cannot be had on this platform, `why_not_here` says so, and the results hold a recorded run alone.

    Raises:
        NoSuchLab: no lab has that name. A run that goes with none has a bench without remedies.
    """

    def __init__(self, subject: str | Run, lab: str | None = None, **options: Any) -> None:
        self.lab = _lab_for(subject, lab)
        self.why_not_here = self.lab.why_not_here()
        self.name = options.pop("name", self.lab.name if isinstance(subject, str) else subject.name)
        self.script = self.lab.program if isinstance(subject, str) else subject.script
        order = random.Random(f"{seed()} {self.lab.name}")
        self.remedies: tuple[Remedy, ...] = tuple(order.sample(self.lab.remedies, len(self.lab.remedies)))
        options = options if isinstance(subject, str) else given_to(subject) | options
        env = options.pop("env", None)
        variables = [f"{key}={value}" for key, value in (env or {}).items()]
        self._around = " ".join([*variables, *options.get("args", ())])
        self.given = "" if isinstance(subject, str) else _in_words({**options, "env": " ".join(variables)})
        self.fault = None if isinstance(subject, str) else line_at_fault(subject)
        self._trials = Trials(self.lab, self.script, options, env)
        # By remedy: what the reader predicts for it; "" while that is still asked.
        self._predicted: dict[str, str] = {}
        self._results: list[Result] = []
        self._shown = [0]
        if self.why_not_here:
            outcome = Outcome(Run.from_folder(self.lab.recorded), None, None, comparable=False)
            self._results.append(Result(RECORDED, "", outcome))
        self._busy = threading.Lock()
        self._view: Any = None
        self._live: Run | None = None

    @property
    def title(self) -> str:
        """The name of the reader's run, with its variables and arguments; and the cause, once a remedy has cured."""
        cured = any(result.cures for result in self._results)
        return " · ".join(filter(None, [f"Fix bench: {self.name}", self._around, self.lab.title if cured else ""]))

    @property
    def results(self) -> Results:
        """One result per run, oldest first."""
        found = Results(self._results)
        found.shown = self._shown
        return found

    def fits(self, name: str) -> bool:
        """Whether the remedy called `name` finds its place in the script."""
        return fits(self.script, self.lab.remedy(name))

    def script_with(self, *names: str) -> str:
        """The script with the remedies of these names put in.

        Raises:
            LaunchError: there is no such remedy, it does not fit the script, or two of them edit the same place.
        """
        try:
            return patched(self.script, [e for n in names for e in self.lab.remedy(n).edits_for(self.script)])
        except LaunchError as error:
            if len(names) == 1 or not all(self.fits(n) for n in names):
                raise
            raise LaunchError(f"FixBench: {' and '.join(names)} edit the same lines; {error}") from None

    def patch(self, *names: str) -> str:
        """The remedies of these names, or what is chosen in the view, as text for `git apply`; variables are told above it.

        Raises:
            LaunchError: as for `script_with`, or nothing is chosen.
        """
        chosen = names or (self._view.names if self._view else ())
        own = self._view.own if self._view and not names else None
        after = self.script_with(*chosen) if own is None else own
        variables = [f"Set {k}={v} for torchrun.\n" for n in chosen for k, v in (self.lab.remedy(n).env or {}).items()]
        old, new = (text.splitlines(keepends=True) for text in (self.script, after))
        lines = list(difflib.unified_diff(old, new, f"a/{self.name}.py", f"b/{self.name}.py"))
        if not lines and not variables:
            raise LaunchError("FixBench: no remedy is chosen, so there is nothing to patch; name one: patch('...').")
        whole = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
        return "".join([*variables, *whole])

    def predict(self, *names: str) -> Answer:
        """Ask what each of these remedies will come to; `run` then takes the prediction, and waits for it.

        In a notebook these are widgets. Where $DDPKIT_ANSWERS names a TOML file, its table for this lab answers.
        """
        questions = [Question(self.lab.remedy(name).title, predictions(self.lab)) for name in names]
        for name in names:
            self._predicted.setdefault(name, "")
        asked = Answer(
            questions,
            PREDICTED,
            lambda said: self._predicted.update(zip(names, said, strict=True)),
            lambda: all(self._predicted[name] for name in names),
        )
        if (given := given_for(self.lab.name)) is not None:
            asked.give(*(given[name] for name in names))
        return asked

    def run(
        self, *names: str, edit: str | None = None, predict: str | None = None, show: bool | str | Sink = False
    ) -> Result:
        """Run the script with the remedies of these `names`, or the text `edit` instead of it; without either, as it is.

        Args:
            predict: one of `trial.PREDICTIONS`, such as "hangs", by default what `predict` was told for the one remedy;
                `response` of the result says whether that was right.
            show: as for `launch`.

        Raises:
            LaunchError: a name or prediction is not known, edits clash, the script does not compile, a run goes on, or the
                failure cannot be had on this platform.
        """
        if self.why_not_here:
            raise LaunchError(f"FixBench: {self.why_not_here} `results` holds a recorded run.")
        if predict not in (None, *PREDICTIONS):
            raise LaunchError(f"FixBench: predict={predict!r} is not known; use {', '.join(map(repr, PREDICTIONS))}.")
        if names and edit is not None:
            raise LaunchError("FixBench: give names of remedies or edit=, not both; script_with() has the text.")
        remedies = [self.lab.remedy(n) for n in names]
        predict = predict or self._predicted.get("".join(names))
        if predict == "":
            raise LaunchError(f"FixBench: predict first what {names[0]!r} will come to; predict() has asked for it.")
        script = self.script_with(*names) if edit is None else edit
        if not self._busy.acquire(blocking=False):
            raise LaunchError("FixBench: a run goes on; wait for it, or stop it.")
        try:
            name = "_".join([self.name, *names])
            run = self._watched(self._trials.run(remedies, script=script, show=show, wait=False, name=name))
            outcome = self._trials.outcome(run, all(r.keeps for r in remedies))
        finally:
            self._live = None
            self._busy.release()
        tried = OWN if edit is not None else " + ".join(r.title for r in remedies) or NOTHING
        self._results.append(Result(tried, predict or "", outcome, " ".join(r.why for r in remedies)))
        if self._view is not None:
            self._view.show_results()
        return self._results[-1]

    def _watched(self, run: Run) -> Run:
        """`run` at its end, which an interrupt or `stop` brings about."""
        self._live = run
        try:
            return run.wait()
        except KeyboardInterrupt:
            return run.stop()

    def stop(self) -> None:
        """End the run that goes on, if one does."""
        if self._live is not None:
            self._live.stop()

    def compare(self) -> Picture:
        """A figure of the results: what each remedy passed.

        Raises:
            LaunchError: nothing has been run yet.
            ImportError: matplotlib is not installed.
        """
        if not self._results:
            raise LaunchError("FixBench: there is nothing to compare yet; run something first.")
        return comparison.draw(self.title, self.results)

    @property
    def offers(self) -> str:
        """`17 remedies`; or, of a failure for which the catalog has none, what there is instead."""
        if self.remedies:
            return f"{len(self.remedies)} remedies"
        page = "" if self.lab.name == UNKNOWN else f"ddpkit.explain({self.lab.name!r}) has its page, and "
        return f"the catalog has no remedies for it: {page}your own edit can be tried"

    def __repr__(self) -> str:
        return f"{self.title} · {self.offers}"

    def _repr_mimebundle_(self, **_: Any) -> Any:
        if self._view is None:
            from .bench_view import BenchView

            self._view = BenchView(self)
        # Where no widget is drawn (GitHub, exported HTML) the table is, as it is now.
        self._shown[0] = len(self._results)
        static = {"text/html": f"<b>{escape(repr(self))}</b>{self.results.html}"} if self._results else {}
        return {**widget_bundle(self._view.box, repr(self)), **static}


def given_to(run: Run) -> dict[str, Any]:
    """The options of `launch` that `run` was started with, its working directory, and where its imports start."""
    spec = wire.read_record(run.folder / wire.JOB) or {}
    given = {"nproc": run.nproc, "timeout": spec.get("timeout_s"), **spec.get("asked", {})}
    if spec.get("stall_s"):
        given["stall"] = spec["stall_s"]
    for name in ("path_folder", "cwd"):
        if os.path.isdir(folder := spec.get(name) or ""):
            given[name] = folder
    return given


def _in_words(options: Mapping[str, Any]) -> str:
    """`3 ranks · MY=1 · args --no-aux · timeout 60`: what was asked for, without what was left as it is by default."""
    agents = options.get("nnodes", 1)
    each = f" for each of {agents} agents" if agents != 1 else ""
    said = [f"{options['nproc']} rank{'s' * (options['nproc'] != 1)}{each}"]
    for name, value in options.items():
        # The default of `warm` is True; all others are false.
        if name in ("nproc", "nnodes", "path_folder", "expect_replicas") or bool(value) == (name == "warm"):
            continue
        words = " ".join(value) if isinstance(value, list | tuple) else str(value)
        said.append({"env": words, "cwd": f"in {words}"}.get(name, f"{name} {words}"))
    return " · ".join(said)


def line_at_fault(run: Run) -> tuple[int, str] | None:
    """The line of `run.script` in which a rank at fault is, and in words what it did there."""
    if not run.revealed or not run.script:
        return None
    script = run.script.splitlines()
    for rank, row in zip(run.ranks, run.rows, strict=True):
        if row.tone != "fault":
            continue
        for frame in reversed(rank.own_frames):
            # A frame of another file of the reader's may have that number as well.
            if frame.source and frame.line <= len(script) and script[frame.line - 1].strip() == frame.source.strip():
                subject = "every rank" if run.culprit == "every rank" else f"rank {rank.rank}"
                return frame.line, f"{subject} {row.words}"
    return None


def _lab_for(subject: str | Run, name: str | None) -> Lab:
    if not isinstance(subject, str | Run):
        raise LaunchError(f"FixBench: {type(subject).__name__} is neither the name of a lab nor a run.")
    if name is not None:
        return lab(name)
    if isinstance(subject, str):
        return lab(subject)
    if subject.diagnosis is None:
        raise LaunchError(f"FixBench: {subject.name} has no diagnosis to choose a lab by; name one: lab=.")
    return lab_for(subject.diagnosis.name, subject.diagnosis.title, subject)
