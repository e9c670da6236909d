"""What came of the runs on a bench, as a table that holds nothing that varies from run to run."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from ddpkit.display.html import table_row
from ddpkit.run import Run
from ddpkit.runfolder import steps

from .trial import Outcome


@dataclass(frozen=True, repr=False)
class Result:
    """One run on the bench. `predicted` is what the reader said before it: "cures", "does not", or "" for nothing; `why`
    says of each remedy in it why it does what it does."""

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
    def cells(self) -> tuple[str, ...]:
        """What stands in its row of the table, the same in every run."""
        found = self.outcome
        codes = "".join(f"{rank.exitcode} " for rank in self.run.ranks).strip()
        return (
            self.tried,
            self.predicted or "–",
            found.words,
            _said(found.replicas_apart),
            _said(found.off_one_process) if found.comparable else "not compared",
            codes,
        )

    def __repr__(self) -> str:
        return f"{self.tried} → {self.outcome.words}"


class Results(tuple[Result, ...]):
    """The results of a bench, oldest first; shown as a table that holds nothing that varies from run to run."""

    TITLES = ("remedy", "you said", "verdict", "replicas", "as one process", "exit codes")

    def __repr__(self) -> str:
        rows = [self.TITLES, *(r.cells for r in self)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.TITLES))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        body = "".join(table_row(map(escape, result.cells)) for result in self)
        return f"<table><thead>{table_row(self.TITLES, 'th')}</thead><tbody>{body}</tbody></table>"


def _said(difference: float | None) -> str:
    if difference is None:
        return "–"
    if steps.equal(difference):
        return "equal"
    return f"{difference:.2g} off" if difference < float("inf") else "not finite"
