"""What every way of showing a job asks of it; `ddpkit.Run` has all of it."""

from __future__ import annotations

from typing import Protocol

from ddpkit.diagnosis.run import Diagnosis
from ddpkit.runfolder.answers import Answered
from ddpkit.runfolder.ranks import Rank
from ddpkit.runfolder.replicas import Replicas
from ddpkit.verdict.finding import Culprit, Verdict

from .rows import Row


class ShownRun(Protocol):
    """A job that is shown; each property is explained in `Run`."""

    revealed: bool

    @property
    def name(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def facts(self) -> str: ...
    @property
    def started(self) -> str: ...
    @property
    def command(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def ranks(self) -> tuple[Rank, ...]: ...
    @property
    def rows(self) -> tuple[Row, ...]: ...
    @property
    def culprit(self) -> Culprit: ...
    @property
    def verdict(self) -> Verdict: ...
    @property
    def diagnosis(self) -> Diagnosis | None: ...
    @property
    def replicas(self) -> Replicas | None: ...
    @property
    def answers(self) -> tuple[Answered, ...]: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
