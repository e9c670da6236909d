"""Which lines of a log may be the cause of its failure, and how near each is to the failure itself."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ddpkit.diagnosis.pages import Page, Signature, all_signatures, page

from .found import Hit, Scan
from .lines import Line
from .progress import DEALT_WITH, alarms, counts
from .tracebacks import Raised

# How near a line is to the failure itself; the smallest wins, then the earliest. A kernel or a scheduler says why; an exception
# does; a printed line does; an exception only says where; a process dies; it loses another; a summary. Lines "beside" a failure
# are never the cause.
TOLD_BY_THE_SYSTEM, SAYS_WHY, PRINTED_WHY, RAISED, DIED, LOST_ANOTHER, SUMMARY, BESIDE = range(8)

# Whoever ends a job ends its ranks: what comes after is a consequence.
ENDS_ALL = frozenset({"ended_from_outside", "time_limit"})
# These tell of another rank than the one that writes them.
OF_ANOTHER = frozenset(
    "collective_timeout peer_lost missing_rank_at_init wrong_address skipped_collective uneven_inputs".split()
)
# These compare ranks, and also differ where one has failed before.
COMPARES = frozenset({"shapes_differ_between_ranks", "collective_mismatch", "duplicate_gpu"})
SENT_BY_LAUNCHER = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})

# These report what another process raised, or how it ended.
_WRAPPERS = set(
    "SystemExit SignalException RayTaskError TrainingFailedError WorkerGroupError RayActorError ActorDiedError TuneError "
    "WorkerCrashedError ExecuteUserScriptError UserCodeError RendezvousGracefulExitError UnexpectedStatusException "
    "JobSubmissionFailedError Error Exit".split()
)
_OF_LAUNCHERS = {"ChildFailedError", "CalledProcessError", "ProcessRaisedException", "ProcessExitedException"}
_BY_ANOTHER = set("BrokenPipeError ConnectionResetError ConnectionAbortedError EOFError CancelledError Empty".split())

# What ranks send to one another may differ in size.
_WORK = re.compile(
    r"(?:PG (?:ID )?(?P<group>\w+).*)?WorkNCCL\(SeqNum=(?P<number>\d+), "
    r"(?P<what>OpType=(?!SEND|RECV|\w*ALLTOALL)\w+, NumelIn=\d+, NumelOut=\d+)"
)
NEVER = math.inf
_ENDED_BY_IT = re.compile(r"signal: Terminated|SIGTERM")


@dataclass(frozen=True)
class Cause:
    """A line that may be the cause. `page` is None where it only says that something ended."""

    nearness: int
    order: int
    page: Page | None
    line: Line
    rank: int | None
    raised: Raised | None = None
    signature: Signature = field(default_factory=Signature)
    named: tuple[int, ...] = ()

    @property
    def weight(self) -> tuple[int, int, int]:
        """Nearness, then time, then how specific: the smallest is the likeliest."""
        how = self.signature
        return self.nearness, self.order, int(how.general) if how.text else 2


def causes(found: Scan, warnings: bool = False) -> list[Cause]:
    """Every line that may be the cause, the likeliest first; also those that only warn of it, if `warnings`."""
    over = _first(found, lambda hit: hit.page.name in ENDS_ALL and not hit.signature.consequence)
    matched = list(_matched(found, over, warnings))
    named = {cause.line.order for cause in matched}
    raised = [cause for cause in _raised(found) if cause.order not in named]
    return sorted([*matched, *raised, *_ended(found, over < NEVER)], key=lambda c: c.weight)


def _first(found: Scan, like: Callable[[Hit], bool]) -> float:
    return min((hit.line.order for hit in found.hits if like(hit)), default=NEVER)


def _matched(found: Scan, over: float, warnings: bool) -> Iterator[Cause]:
    """The lines that a signature of the catalog matches."""
    elastic, apart, own = _under_torchrun(found), _apart(found), _own(found)
    failed = warnings or bool(found.raised) or any(end.exitcode for end in found.ends)
    first_own = min(own.values(), default=NEVER)
    lost = _first(found, lambda hit: hit.signature.consequence or hit.page.name == "node_lost")
    for hit in found.hits:
        if _is_dealt_with(found, hit, failed):
            continue
        nearness, order, name = _nearness(hit), hit.line.order, hit.page.name
        after_own = order > first_own and name in OF_ANOTHER | COMPARES
        after_lost = order > lost and name in OF_ANOTHER and not hit.signature.names_rank
        after_all = order > over or (over < NEVER and _ENDED_BY_IT.search(hit.line.text))
        if nearness == PRINTED_WHY and hit.signature.where != "stderr" and hit.rank in own:
            # A program prints errors that it has dealt with; the exception that ended it says more.
            nearness, order = RAISED, max(order, own[hit.rank] + 1)
        if after_own or after_lost or after_all:
            nearness = max(nearness, LOST_ANOTHER)
        # Under torchrun a task of the scheduler is an agent, not a rank.
        rank = None if elastic and hit.signature.where == "log" and hit.line.rank is None else hit.rank
        told = page("collective_mismatch") if hit.line.order in apart else hit.page
        yield Cause(nearness, order, told, hit.line, rank, signature=hit.signature, named=hit.named)


def _is_dealt_with(found: Scan, hit: Hit, failed: bool) -> bool:
    """Whether the job went on after that line, or only warned."""
    if hit.page.name == "nan_loss" and hit.signature.where == "log":
        return not _at_the_end(found, hit)
    # A rank may say that it is done long before the others miss it.
    if not hit.signature.beside and found.went_on(hit.line):
        return True
    nearness = _nearness(hit)
    harmless = not failed and nearness in (PRINTED_WHY, LOST_ANOTHER) and not alarms(hit.line.text)
    return harmless or (nearness == PRINTED_WHY and bool(DEALT_WITH.search(hit.line.text)))


def _own(found: Scan) -> dict[int | None, int]:
    """Where each rank first raised an exception itself that the catalog does not know, and did not go on."""
    known = {hit.line.order for hit in found.hits}
    first: dict[int | None, int] = {}
    for raised in found.raised:
        line = raised.line
        reported = raised.type in _OF_LAUNCHERS | _WRAPPERS | _BY_ANOTHER or raised.type.endswith("Warning")
        if line.order not in known and not reported and not found.went_on(line):
            first.setdefault(line.rank, line.order)
    return first


def _apart(found: Scan) -> set[int]:
    """The timeouts of one collective that had other sizes, or was another one, on other ranks."""
    works: dict[tuple[str, str], dict[str, list[int]]] = {}
    for hit in found.hits:
        if hit.page.name == "collective_timeout" and (work := _WORK.search(hit.line.text)):
            of_group = works.setdefault((work["group"] or "", work["number"]), {})
            of_group.setdefault(work["what"], []).append(hit.line.order)
    return {order for work in works.values() if len(work) > 1 for orders in work.values() for order in orders}


def _nearness(hit: Hit) -> int:
    if hit.signature.beside:
        return BESIDE
    if hit.page.name == "summary_only" or (hit.signature.consequence and hit.page.name in ENDS_ALL):
        return SUMMARY
    if hit.signature.consequence:
        return LOST_ANOTHER
    if hit.signature.general or hit.page.name in ENDS_ALL:
        return RAISED
    if hit.signature.where == "log":
        return TOLD_BY_THE_SYSTEM
    return SAYS_WHY if hit.raised else PRINTED_WHY


def _raised(found: Scan) -> Iterator[Cause]:
    """The exceptions, as if the catalog knew none of them."""
    for raised in found.raised:
        line, order, rank = raised.line, raised.line.order, raised.line.rank
        if raised.type.endswith("Warning") or found.went_on(line):
            continue
        if raised.type in _OF_LAUNCHERS:
            yield Cause(SUMMARY, order, page("summary_only"), line, rank)
        elif raised.type in _WRAPPERS:
            yield Cause(SUMMARY, order, None, line, rank)
        else:
            # What a loader meets while it asks its workers, it raises again as what became of them.
            met = raised.type in _BY_ANOTHER or any(frame.function == "_try_get_data" for frame in raised.frames)
            yield Cause(DIED if met else RAISED, order, page("own_exception"), line, rank, raised)


def _ended(found: Scan, over: bool) -> Iterator[Cause]:
    """The ends of processes: by a signal, or with the exit code of a rank that said nothing else."""
    by_signal = {signature.signal: each for each, signature in all_signatures() if signature.signal}
    spoke = {raised.line.rank for raised in found.raised} | {h.rank for h in found.hits if not h.signature.beside}
    elastic = _under_torchrun(found)
    for end in found.ends:
        if found.went_on(end.line):
            continue
        order = end.line.order
        rank = end.rank if end.by_torchrun or not elastic else None
        first = end.by_torchrun and not end.listed
        if end.signal in SENT_BY_LAUNCHER and (over or not first):
            yield Cause(SUMMARY, order, page("ended_from_outside"), end.line, rank)
        elif end.signal in by_signal:
            # A rank whose peer is gone may abort.
            nearness = LOST_ANOTHER if end.signal == "SIGABRT" else DIED
            yield Cause(nearness, order, by_signal[end.signal], end.line, rank)
        elif first and end.rank is not None and end.rank not in spoke and (spoke - {None} or end.exitcode > 2):
            yield Cause(DIED, order, page("exit_code"), end.line, end.rank)
        elif end.exitcode:
            yield Cause(SUMMARY, order, page("summary_only"), end.line, rank)


def _under_torchrun(found: Scan) -> bool:
    return any(end.by_torchrun for end in found.ends)


def left_early(found: Scan, possible: list[Cause]) -> Cause | None:
    """The line in which one rank says that it is done, and says so more often than the others, which wait for it."""
    # Once a process has ended, its launcher says that it is done, too.
    ended = min((end.line.order for end in found.ends), default=NEVER)
    waited = {c.rank for c in possible if c.nearness == LOST_ANOTHER and c.order < ended}
    done = [c for c in possible if c.page is page("early_exit") and c.rank is not None]
    often = Counter(c.rank for c in done).most_common(2)
    if not often or often[0][0] in waited or (len(often) == 2 and often[0][1] == often[1][1]):
        return None
    return max((c for c in done if c.rank == often[0][0]), key=lambda c: c.order)


def _at_the_end(found: Scan, hit: Hit) -> bool:
    """Whether the last lines of the log still match, and no steps follow."""
    steps = 0
    for line in reversed(found.tail.get(hit.line.file, ())):
        if hit.signature.pattern.search(line.text):
            return steps < 3
        steps += counts(line.text)
    return False
