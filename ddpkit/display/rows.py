"""One row for each rank of a job that stands still or has ended, in words; every form of showing it has these rows."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ddpkit.runfolder.account import Ending, as_they_stood
from ddpkit.runfolder.failures import FAILED_IN_CHECKPOINT, LEAVES
from ddpkit.runfolder.frames import Frame
from ddpkit.runfolder.ranks import Rank
from ddpkit.runfolder.stable import stable
from ddpkit.verdict.ends import End, end_by
from ddpkit.verdict.finding import Verdict
from ddpkit.verdict.phrases import ranks_said
from ddpkit.verdict.places import STILL_FROM_S, Place, unmoved_s
from ddpkit.verdict.waits import scene

MOST_FRAMES = 60
_STATES = {
    "waiting": "waits",
    "joining": "waits to join",
    "loading": "waits for its loader",
    "busy": "computes",
    "idle": "sits idle",
    "stopped": "is stopped (SIGSTOP)",
    "left": "left, exit code 0",
    "late": "came too late",
    "unknown": "is somewhere unknown",
}
MET: dict[str, str] = {
    "peer_lost": "lost its peer",
    "gave_up": "gave up waiting",
    "reported": "was told that a rank had failed",
}
LOST = "was lost with its host"
_HAD_ENDED = re.compile(r"Detected at least one rank that exhausted inputs")
_ENDED_BY = {"stopped": "stopped", "timeout": "ended at the timeout", "stall": "ended at the stall"}


@dataclass(frozen=True)
class Row:
    """One rank: its `state` in words, `where` it is in the user's code, the `collective` that it waits in or joined last.

    `tone` is fault, waiting, passed or "". `whom`: the ranks that it waits for, where the culprit cannot be told. `silent_s`
    and `busy` (share of a core) are as ddpkit found them; `stack` is innermost first; `workers` are the stacks of its
    DataLoader workers.
    """

    rank: int
    state: str
    tone: str = ""
    where: str = ""
    collective: str = ""
    waits: bool = False
    whom: tuple[int, ...] = ()
    message: str = ""
    silent_s: float | None = None
    busy: float | None = None
    stack: tuple[Frame, ...] = ()
    workers: tuple[tuple[Frame, ...], ...] = ()
    node: str = ""

    @property
    def name(self) -> str:
        """`rank 1`, or `rank 1 on node0` in a job of several agents."""
        return f"rank {self.rank} on {self.node}" if self.node else f"rank {self.rank}"

    @property
    def words(self) -> str:
        """`waits in all_reduce #4 for rank 1`, or the state alone."""
        state, colon, rest = self.state.partition(": ")
        said = f"{state} in {self.collective}" if self.waits and self.collective else state
        return f"{said} for {ranks_said(self.whom)}{colon}{rest}" if self.whom else f"{said}{colon}{rest}"

    @property
    def said(self) -> str:
        """`line 14: time.sleep(60) · last joined all_reduce #3`; also the exception, unless the state names it."""
        return self._said(self.message if self.message.partition(":")[0] not in self.state else "")

    @property
    def said_in_full(self) -> str:
        """As `said`, with the exception in every case."""
        return self._said(self.message)

    def _said(self, message: str) -> str:
        joined = f"last joined {self.collective}" if self.collective and not self.waits else ""
        return stable(" · ".join(s for s in (message, self.where, joined) if s))


@dataclass(frozen=True)
class Standstill:
    """A job in which nothing moves: the verdict so far ("" while it is held back), and the ranks `at_s` after the start."""

    sentence: str
    rows: tuple[Row, ...]
    at_s: float


def rows(
    ranks: Sequence[Rank],
    at_fault: Collection[int] = (),
    revealed: bool = True,
    steady: bool = False,
    waits: Mapping[int, tuple[int, ...]] | None = None,
) -> tuple[Row, ...]:
    """A row for each rank. `steady` leaves out what varies from run to run.

    Without `revealed` a row draws no conclusion: the system's own word for the state, no tone. `waits`: whom each rank
    waits for, where the culprit cannot be told.
    """
    shown = []
    for rank, before in zip(ranks, as_they_stood(ranks), strict=True):
        shown.append(replace(rank, failure=before.failure) if revealed else rank)
    at, found = scene(shown).at if revealed else {}, []
    for rank in shown:
        row = _row(rank, at.get(rank.rank), rank.rank in at_fault and revealed, revealed, steady)
        waited_for = (waits or {}).get(rank.rank, ()) if revealed and (row.waits or row.tone == "waiting") else ()
        found.append(replace(row, node=rank.node, whom=waited_for))
    return tuple(found)


def _row(rank: Rank, place: Place | None, at_fault: bool, revealed: bool, steady: bool) -> Row:
    lost = revealed and rank.words == LOST
    still = stood_still(rank) and not lost
    if still and place:
        return _still_row(rank, place, at_fault)
    look, last = rank.look, rank.collective
    failure, alive = rank.failure, rank.exitcode is None and not lost
    seen = rank.at if look and (still or not steady) else None
    line = failure.where if failure else seen
    ended = rank.words if revealed and rank.words else rank.plain_words
    state = (look.state if look else "running") if alive else ended
    waited = state.startswith("gave up waiting")
    if waited and place:
        last = place.collective
    return Row(
        rank.rank,
        state,
        tone=_tone(rank, at_fault) if revealed else "",
        where=line.text if line else "",
        collective=last.name if last and (still or waited or not steady) else "",
        waits=waited,
        message=failure.text if failure and not (revealed and rank.role == "consequence") else "",
        silent_s=look.silent_s if look and still else None,
        busy=look.busy if look and still else None,
        stack=_without_start(rank.stack_frames) if seen else (),
    )


def _still_row(rank: Rank, place: Place, at_fault: bool) -> Row:
    look, waits = rank.look, place.kind == "waiting"
    shown = place.collective if waits else rank.collective
    collective = shown.name if shown else ""
    if waits and shown and shown.where and place.line and shown.where.line != place.line.line:
        collective += f", {shown.where.text}"
    silent_s = look.silent_s if look else None
    if waits and look and shown and not shown.done:
        silent_s = (look.at_ns - shown.at_ns) / 1e9
    return Row(
        rank.rank,
        "waits for the disk" if place.at_disk else _STATES[place.kind],
        tone="fault" if at_fault else "waiting" if place.kind in ("waiting", "joining") else "",
        where=place.line.text if place.line else "",
        collective=collective,
        waits=waits,
        silent_s=silent_s,
        busy=look.busy if look else None,
        stack=_without_start(rank.stack_frames),
        workers=tuple(map(_without_start, rank.helpers)),
    )


def stood_still(rank: Rank) -> bool:
    """Whether the rank made no progress when ddpkit looked, and has not ended by itself since."""
    look, ended = rank.look, rank.failure is not None or rank.exitcode == 0
    if look is None or ended:
        return False
    return rank.exitcode is None or look.why == "stall" or unmoved_s(rank) >= STILL_FROM_S


def _tone(rank: Rank, at_fault: bool) -> str:
    return "fault" if at_fault else {"passed": "passed", "consequence": "waiting", "own": "fault"}.get(rank.role, "")


def _without_start(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames up to the user's outermost one: those further out only start the script."""
    outermost = max((i for i, frame in enumerate(frames) if frame.own), default=len(frames) - 1)
    return tuple(frames[: outermost + 1][:MOST_FRAMES])


def with_words(ranks: Sequence[Rank], verdict: Verdict, ending: Ending) -> tuple[Rank, ...]:
    """The ranks of a job that was judged, each with its role and its words."""
    found = []
    for rank in ranks:
        role = verdict.roles.get(rank.rank, "unknown")
        found.append(replace(rank, words=lane_words(rank, verdict, ending), role=role))
    return tuple(found)


def lane_words(rank: Rank, verdict: Verdict, ending: Ending) -> str:
    """The words for one rank of a job that was judged."""
    end, at_fault = verdict.ends.get(rank.rank), verdict.roles.get(rank.rank) == "culprit"
    if rank.node in ending.lost_nodes:
        return LOST
    if end == "passed":
        return "left early, exit code 0" if at_fault else "passed"
    if end in MET:
        met = _met(rank, end, verdict.kind)
        return f"{met}: a consequence" if not at_fault else "came too late" if verdict.kind == "straggler" else met
    if end == "parted":
        return "met another model" if verdict.kind == "shapes_differ" else "met another collective"
    return _words_of_ended(rank, ending) if end == "was_ended" else rank.plain_words


def _met(rank: Rank, end: End, kind: str) -> str:
    message = rank.failure.message if rank.failure else ""
    if _HAD_ENDED.search(message):
        return "was told that a rank had ended"
    if FAILED_IN_CHECKPOINT.search(message):
        return "was told that a rank had failed"
    return "met another rank's nan" if end == "reported" and kind == "not_finite" else MET[end]


def _words_of_ended(rank: Rank, ending: Ending) -> str:
    if rank.killed_for.startswith("it "):
        return f"{rank.killed_for.removeprefix('it ')}, then ended by SIGKILL"
    by = _ENDED_BY.get(ending.reason) or (
        "ended after torchrun's death" if ending.agent_signal else "ended by torchrun"
    )
    failure = rank.failure
    if failure and failure.type not in (rank.signal, *LEAVES) and end_by(failure, rank) == "own":
        return f"{by}, and raised {failure.type} then"
    return by
