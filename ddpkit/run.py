"""`Run`: one job as plain data, rebuilt from its run folder on any machine, with its text and HTML forms."""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .diagnosis.run import Diagnosis, diagnose, of_replicas
from .display.rows import Row, rows, with_words
from .display.text import as_text, headline, ranks_counted
from .runfolder import wire
from .runfolder.account import Account, Ending, read_account, returned_values
from .runfolder.answers import Answered, read_answers
from .runfolder.folders import found_run, packed
from .runfolder.ranks import Rank
from .runfolder.replicas import Replicas, compare
from .verdict.finding import Culprit, Verdict
from .verdict.judge import judge, judge_job

if TYPE_CHECKING:
    from .display.picture import Picture
    from .processes.agent import Job


class JobFailed(RuntimeError):
    """The job did not pass and the caller had asked for `check=True`. `run` holds everything that is known."""

    def __init__(self, run: Run) -> None:
        super().__init__(str(run))
        self.run = run


class Run:
    """A job: `run.ok`, `run.state`, `run.culprit`, `run.ranks[i]`. Made by `ddpkit.launch`, or `Run.from_folder(path)`.

    A run that still goes on (`launch(wait=False)`) has state "running"; `wait()` and `stop()` act on it.
    """

    def __init__(self, folder: Path, job: Job | None = None, revealed: bool = True) -> None:
        self.folder = folder
        self.revealed = revealed
        self._job = job
        self._spec = wire.read_record(folder / wire.JOB) or {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Run:
        """Rebuild a run from its folder, or from the zip that `bundle` wrote of it; no process and no torch is needed.

        Raises:
            FileNotFoundError: there is no run in `folder`.
        """
        return cls(found_run(folder))

    @classmethod
    def attach(cls, folder: str | Path, show: bool | str | None = None) -> Run:
        """Find a job on Slurm again that another process has launched, and watch it to its end; `show` as in `launch`."""
        # By name: launching is above this file.
        attach = import_module("ddpkit.launcher.on_slurm").attach
        return cast(Run, attach(found_run(folder), show))

    # What was asked for.

    @property
    def name(self) -> str:
        """The script's, module's or function's name, or what `name=` or `--as` said."""
        return self._spec.get("name", self.folder.name)

    @property
    def nproc(self) -> int:
        """Ranks asked for of each agent: on each host."""
        return int(self._spec.get("nproc", 0))

    @property
    def world_size(self) -> int:
        """Ranks asked for of all agents."""
        return int(self._spec.get("world_size", self.nproc))

    @property
    def backend(self) -> str:
        """The backend decided before the ranks started, "gloo" or "nccl"; a script that names its own keeps that."""
        return self._spec.get("backend", "")

    @property
    def command(self) -> str:
        """A shell line that starts the same job with plain torchrun, without ddpkit."""
        return self._spec.get("command", "")

    @property
    def script(self) -> str:
        """The program's text as it ran, line for line as tracebacks count; "" for a module or a function."""
        name = self._spec.get("script", "")
        return wire.read_text(self.folder / name) if name and name != wire.FUNCTION_SCRIPT else ""

    @property
    def facts(self) -> str:
        """`2 ranks · gloo on CPU`."""
        return " · ".join([ranks_counted(self.world_size), self._spec.get("device_words", self.backend)])

    # What became of it.

    @property
    def state(self) -> str:
        """running, passed, failed, hung, timed_out or stopped."""
        return self._known[0].state if self._is_over() else "running"

    @property
    def ok(self) -> bool:
        """Whether every rank and torchrun itself ended with exit code 0."""
        return self.state == "passed"

    @property
    def warm(self) -> bool:
        """Whether torchrun and every rank were forked from a process that had imported torch already."""
        return not self.cold_because

    @property
    def cold_because(self) -> str:
        """Why not all of the job was started warm: `warm=False`, a variable that torch reads when it starts; "" if it was."""
        if why := self._spec.get("cold_because", "started by an older ddpkit"):
            return why
        cold = [r.rank for r in self.ranks if r.warm is False]
        return f"rank {cold[0]} could not be forked from the warm process" if cold else ""

    @property
    def started(self) -> str:
        """`started warm`, or `started cold: warm=False`; on Slurm's hosts `Slurm job 12`."""
        slurm, cold = self._spec.get("slurm"), self.cold_because
        return f"Slurm job {slurm}" if slurm else f"started cold: {cold}" if cold else "started warm"

    @property
    def attempts(self) -> tuple[tuple[Rank, ...], ...]:
        """The ranks of each attempt; more than one where `--max-restarts` let torchrun try again."""
        account, last = self._known
        *earlier, _ = account.attempts or [()]
        before = [with_words(ranks, judge(ranks, Ending()), Ending()) for ranks in earlier]
        return (*before, with_words(account.last_attempt, last, account.ending)) if account.attempts else ()

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Every rank of the last attempt, in order. A rank that never started is not there."""
        account, verdict = self._known
        return with_words(account.last_attempt, verdict, account.ending)

    @property
    def verdict(self) -> Verdict:
        """The rank at fault, in a sentence, and the part of each rank."""
        return self._known[1]

    @property
    def culprit(self) -> Culprit:
        """The rank at fault; a tuple of ranks or "every rank" where they fail alike; None where none can be named."""
        return self.verdict.culprit

    @cached_property
    def _replicas(self) -> Replicas | None:
        return compare(self._known[0].last_attempt) if self.ok and self._spec.get("expect_replicas", True) else None

    @property
    def replicas(self) -> Replicas | None:
        """Whether the ranks' DDP models are the same at the end: "equal", or "0.41 apart, first in head.weight".

        A string that also has `apart` and `buffers`. None where nothing can be compared: the job did not pass, a rank had
        no DDP model, or one with other parameters, or one on a GPU that was freed before its process group.
        """
        return self._replicas if self._is_over() else None

    @property
    def diagnosis(self) -> Diagnosis | None:
        """What went wrong, by the catalog, with the lines that tell it; None for a job that goes on, or passed as it should."""
        return self._diagnosis if self._is_over() else None

    @cached_property
    def _diagnosis(self) -> Diagnosis | None:
        if self.replicas and self.replicas.apart:
            return of_replicas(self.replicas)
        return diagnose(self.ranks, self.verdict, self.torchrun_log)

    @property
    def answers(self) -> tuple[Answered, ...]:
        """What the reader said to `ddpkit.answer`, each beside the right answer."""
        return read_answers(self.folder)

    @property
    def notes(self) -> tuple[str, ...]:
        """What else the user should know: processes that had to be ended, a log that was capped, a disk that was full."""
        return self._known[0].notes

    @property
    def reported(self) -> dict[int, dict[str, Any]]:
        """What each rank handed over by `ddpkit.rank.report(...)`: rank to names and latest values."""
        return {rank.rank: rank.reported for rank in self._known[0].last_attempt}

    @property
    def returned(self) -> dict[int, Any]:
        """What the launched function returned: rank to value. Unpickled when asked for, and only for a job of this process.

        Raises:
            PermissionError: the run was read from a folder.
        """
        if self._job is None:
            why = f"{self.folder.name} was read from a folder, and unpickling its values could run foreign code"
            raise PermissionError(f"run.returned: {why}. Launch it here, or use ddpkit.rank.report(...) in the ranks.")
        return returned_values(self._known[0].last_attempt)

    @property
    def torchrun_log(self) -> str:
        """What torchrun's agents themselves printed."""
        return "".join(wire.read_text(own / wire.AGENT_LOG) for own in wire.node_folders(self.folder))

    # Acting on a run that still goes on.

    def wait(self, timeout: float | None = None) -> Run:
        """Return when the job is over, or after `timeout` seconds with `state` still "running"."""
        if self._job is not None:
            self._job.over.wait(timeout)
        return self

    def stop(self) -> Run:
        """End every rank and return when none is left."""
        if self._job is not None:
            self._job.stop("stopped")
            self._job.wait()
        return self

    def check(self) -> Run:
        """The run itself if it passed; raises `JobFailed` if it did not."""
        if not self.ok:
            raise JobFailed(self)
        return self

    def reveal(self, anyway: bool = False) -> Run:
        """The same run with its verdict shown, for one of `reveal=False`, once `ddpkit.answer` was answered or `anyway`."""
        if not (anyway or self.answers):
            print("reveal: nothing yet. Answer first: ddpkit.answer(run) asks. reveal(anyway=True) does not ask.")
            return self
        return Run(self.folder, self._job, revealed=True)

    def bundle(self, path: str | Path | None = None) -> Path:
        """Write the run folder into a zip, for a bug report, and return its path. Pickled values are left out."""
        return packed(self.folder, path, summary=str(self))

    @property
    def headline(self) -> str:
        """`broken → failed · 2 ranks · rank 1: ValueError, line 7: raise ValueError("boom")`, the same in every run."""
        return headline(self)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The ranks as the text and HTML forms show them, the same in every run."""
        at_fault = [rank.rank for rank in self.ranks if rank.role == "culprit"]
        return rows(self.ranks, at_fault, self.revealed, steady=True, waits=self.verdict.waits)

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__

    def plot(self) -> Picture:
        """A figure of the ranks over time: what each did, what it waited in, and how it ended. Needs matplotlib."""
        from .display.timeline import draw

        return draw(self)

    def plot_memory(self) -> Picture:
        """A figure of each rank's memory: its peak, what filled it, and the budget if one was set. Needs matplotlib."""
        from .display.memory_plot import draw

        return draw(self)

    def _repr_html_(self) -> str:
        """The same words as the text form."""
        from .display.html import as_html

        return as_html(self)

    def _ipython_display_(self) -> None:
        """Shown as HTML and text, unless `launch` has just shown it in this very cell."""
        from .display.notebook import display_run

        display_run(self)

    # What the folder says, read again until the job is over.

    @property
    def _known(self) -> tuple[Account, Verdict]:
        return self._final if self._is_over() else self._read()

    @cached_property
    def _final(self) -> tuple[Account, Verdict]:
        return self._read()

    def _is_over(self) -> bool:
        return self._job is None or self._job.ended.is_set()

    def _read(self) -> tuple[Account, Verdict]:
        end = self._job.end if self._job is not None else wire.read_record(self.folder / wire.END) or {}
        account = read_account(self.folder, self._spec, end, self.torchrun_log)
        return account, judge_job(account.attempts, account.ending)
