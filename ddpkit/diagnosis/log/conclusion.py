"""`ddpkit.diagnose`: names the failure that a run or any log tells of, who is at fault, and what only followed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ddpkit.diagnosis.evidence import Evidence
from ddpkit.diagnosis.pages import Signature, page
from ddpkit.diagnosis.run import HEALTHY, UNKNOWN, Confidence, Diagnosis
from ddpkit.errors import LogError
from ddpkit.run import Run
from ddpkit.runfolder import wire
from ddpkit.runfolder.stable import shortened
from ddpkit.verdict.finding import Culprit
from ddpkit.verdict.phrases import ranks_said

from . import causes as near
from .causes import Cause, causes
from .found import Scan
from .lines import Line, Source, sources
from .progress import ends_well
from .scan import scan

MOST_EVIDENCE, MOST_OF_A_LINE, MOST_OF_A_SENTENCE = 64, 240, 200
_EVERY_LOG = (
    "The other ranks' logs. `torchrun -r 3 -t 3 --log-dir logs` keeps one for each; then `ddpkit diagnose logs`."
)
_HOW_IT_ENDED = (
    "The job's exit code, its last lines, and what the launcher, the scheduler and the kernel said of it; with "
    f"`ddpkit run` instead, stacks and exit codes of every rank. {_EVERY_LOG}"
)
_WHOM_IT_WAITED_FOR = (
    "Every rank's own log; once more with TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 (NCCL), and the flight recorder "
    "says which rank had not come. Or start it by `ddpkit run --stop-on-stall`."
)


@dataclass(frozen=True)
class Found(Evidence):
    """A line of a log: `file` as the user named it, and the number of the `line` there."""

    @property
    def said(self) -> str:
        """`train.log:88, rank 1: ValueError: boom`."""
        who = "" if self.rank is None else f", rank {self.rank}"
        return f"{self.file}:{self.line}{who}: {shortened(self.text, MOST_OF_A_LINE)}"


def diagnose(*what: Run | str | Path) -> Diagnosis:
    """What went wrong, by a run or by logs: the failure, the rank, the lines that say it, what only followed.

    Args:
        what: a `Run`; or logs: paths of files, patterns such as `logs/*.err`, folders (of a run, or torchrun's `--log-dir`),
            `-` for standard input; or the text of a log, of more than one line. Several logs count as one job's.

    Returns:
        A diagnosis; its `name` is "healthy" where a log tells of a good end, "unknown" where of neither that nor a known failure.

    Raises:
        LogError: there is nothing to read, or it cannot be read.
    """
    if not what:
        raise LogError("diagnose: nothing was named. Give a run, a log's path, a folder, or the text of a log.")
    if len(what) == 1 and (run := _run_of(what[0])):
        return run.diagnosis or _healthy(f"{run.name} ended with exit code 0 on every rank.")
    logs: list[Source] = []
    for each in what:
        if not isinstance(each, (str, Path)):
            raise LogError(
                f"diagnose: {each.name} is a run, and a run is diagnosed alone, but {len(what)} things were named. Name one."
            )
        text = isinstance(each, str) and "\n" in each
        logs += [Source("<text>", data=str(each).encode("utf-8", "replace"))] if text else sources([each])
    return diagnosis_of(scan(logs))


def _run_of(what: Run | str | Path) -> Run | None:
    """The run that `what` is, or whose folder it names."""
    if not isinstance(what, (str, Path)):
        return what
    path = None if "\n" in str(what) else Path(what).expanduser()
    return Run.from_folder(path) if path and (path / wire.JOB).is_file() else None


def diagnosis_of(found: Scan) -> Diagnosis:
    """The diagnosis of what was found in logs; where several launches follow each other, of the last one."""
    judged = _judged(found.of_launch(last=True))
    if not found.launches or not (before := causes(found.of_launch(last=False))):
        return judged
    line, name = before[0].line, before[0].page.name if before[0].page else UNKNOWN
    mention = f"An earlier launch failed as well: {name}, line {line.number}."
    return replace(judged, sentence=f"{judged.sentence} {mention}".lstrip())


def _judged(found: Scan) -> Diagnosis:
    possible = causes(found)
    if not possible and not any(ends_well(tail) for tail in found.tail.values()):
        possible = causes(found, warnings=True)
    if not possible or possible[0].nearness == near.BESIDE:
        return _nothing(found)
    best = possible[0]
    if best.nearness == near.LOST_ANOTHER and (early := near.left_early(found, possible)):
        best = early
    if best.nearness == near.SUMMARY:
        best = next((c for c in possible if c.page is page("summary_only")), best)
    if best.page is None:
        title = "It failed, and this log does not say of what."
        return Diagnosis(UNKNOWN, title, "", None, _shown(possible), (), "unknown", _EVERY_LOG)
    same, rivals, followed = _sorted_out(possible, best)
    rank = _culprit(best, same, found)
    confidence: Confidence = "certain" if _is_sure(best) and not rivals else "likely"
    collect = "" if best.nearness < near.LOST_ANOTHER else _EVERY_LOG
    if best.page.name == "collective_timeout":
        collect = _WHOM_IT_WAITED_FOR
    name, title, sentence = best.page.name, best.page.title, _sentence(best, rank)
    return Diagnosis(name, title, sentence, rank, _shown(same) + _shown(rivals), _shown(followed), confidence, collect)


def _sorted_out(possible: list[Cause], best: Cause) -> tuple[list[Cause], list[Cause], list[Cause]]:
    """The causes that tell of the same failure as `best`, those that compete with it, and those that only followed."""
    same, rivals, followed = [], [], []
    for cause in possible:
        near_enough = cause is best or (
            best.nearness != near.BESIDE and cause.nearness <= max(near.DIED, best.nearness)
        )
        if cause.page is best.page and near_enough and _alike(cause, best):
            same.append(cause)
        elif _competes(cause, best):
            rivals.append(cause)
        elif cause.nearness != near.SUMMARY and cause.page not in (None, page("early_exit")):
            followed.append(cause)
    at = {(cause.line.file, cause.line.number) for cause in same}
    return same, rivals, [cause for cause in followed if (cause.line.file, cause.line.number) not in at]


def _is_sure(best: Cause) -> bool:
    """Whether the rank that failed says so, in words that nothing else would use."""
    if best.nearness >= near.DIED or best.nearness == near.PRINTED_WHY:
        return False
    vague = best.signature.general or best.signature.shared
    return not vague and (best.raised is None or bool(best.raised.frames))


def _alike(cause: Cause, best: Cause) -> bool:
    """Whether both are one failure: exceptions that the catalog does not know need the same type and message."""
    if best.raised is None or cause.raised is None:
        return True
    return (cause.raised.type, cause.raised.message[:40]) == (best.raised.type, best.raised.message[:40])


def _competes(cause: Cause, best: Cause) -> bool:
    """Whether `cause` may be what failed as well as `best`: as near to the failure, of another kind, and no consequence of it."""
    if cause.page is None or cause.nearness > near.RAISED or best.nearness > near.RAISED or best.page is None:
        return False
    if cause.page is not best.page:
        foreign = cause.page.name in near.OF_ANOTHER | near.COMPARES | near.ENDS_ALL
        earlier = cause.order < best.order and cause.rank != best.rank
        return not foreign and not cause.signature.general and (cause.raised is None or earlier)
    return None not in (cause.rank, best.rank) and cause.rank != best.rank and not _alike(cause, best)


def _culprit(best: Cause, same: Sequence[Cause], found: Scan) -> Culprit:
    name = best.page.name if best.page else ""
    if name in near.ENDS_ALL or name == "node_lost":
        return None
    if name in near.OF_ANOTHER:
        named = sorted({rank for c in same for rank in c.named})
        return tuple(named) if len(named) > 1 else named[0] if named else None
    ranks = tuple(sorted({c.rank for c in same if c.rank is not None}))
    world = found.ranks | {e.rank for e in found.ends if e.listed and e.rank is not None}
    # A rank is the odd one only where it alone, of three or more, says so.
    if name in near.COMPARES and (len(ranks) != 1 or len(world) < 3):
        return None
    if not ranks or best.nearness == near.SUMMARY:
        return _not_labelled(len({cause.line.order for cause in same}), best, found)
    if len(ranks) == 1:
        return ranks[0]
    return "every rank" if world <= set(ranks) == set(range(len(ranks))) else ranks


def _not_labelled(times: int, best: Cause, found: Scan) -> Culprit:
    """The rank of lines that name none: the ranks in torchrun's summary, if there are as many as lines; else the one that it
    calls the first to fail, or the only one that ended by itself."""
    told = [e for e in found.ends if e.exitcode and e.rank is not None and e.signal not in near.SENT_BY_LAUNCHER]
    listed = sorted({e.rank for e in found.ends if e.listed and e.rank is not None})
    if times > 1 and listed and near.TOLD_BY_THE_SYSTEM < best.nearness < near.SUMMARY:
        if times < len(listed) or len(listed) == 1:
            return None
        return "every rank" if listed == list(range(len(listed))) else tuple(listed)
    if best.nearness == near.TOLD_BY_THE_SYSTEM:
        # Under torchrun a task of the scheduler is an agent, not a rank, and a kernel knows no ranks.
        told = [e for e in told if e.by_torchrun]
    ranks = {e.rank for e in told if e.root} or {e.rank for e in told if not e.listed}
    return ranks.pop() if len(ranks) == 1 else None


def _shown(several: Iterable[Cause]) -> tuple[Found, ...]:
    """The first line of each rank, and every different line of unknown ranks."""
    first: dict[tuple[int | None, str], Found] = {}
    for cause in several:
        line = cause.line
        if len(first) < MOST_EVIDENCE:
            first.setdefault((line.rank, "" if line.rank is not None else line.text), _line(line, cause.signature))
    return tuple(first.values())


def _sentence(best: Cause, rank: Culprit) -> str:
    who = "Every rank" if rank == "every rank" else ""
    if isinstance(rank, (int, tuple)):
        who = ranks_said(rank if isinstance(rank, tuple) else (rank,)).capitalize()
    if best.raised is None:
        told = best.signature.pattern.search(best.line.text) if best.signature.text else None
        if (hosts := told.groupdict() if told else {}).get("lost"):
            return f"{hosts['lost']} was lost."
        if reporter := hosts.get("reporter"):
            return f"{reporter} only reports it: the rendezvous is gone, with the host or the job that kept it."
        how = "missing" if best.named else "at fault"
        return f"{who} {'are' if isinstance(rank, tuple) else 'is'} {how}." if who else ""
    where = best.raised.where
    at = f" at {where.file}:{where.line}" if where else ""
    of = f": {where.source}" if where and where.source else ""
    return shortened(f"{who or 'A process'} raised {best.raised.type}{at}{of}.", MOST_OF_A_SENTENCE)


def _nothing(found: Scan) -> Diagnosis:
    """Healthy where a log tells of a good end; else what to collect."""
    for last in [tail[-1] for tail in found.tail.values() if tail]:
        if last.text.endswith("^C"):
            stopped = page("ended_from_outside")
            return Diagnosis(stopped.name, stopped.title, "", None, (_line(last),), (), "likely", "")
    if found.cut:
        file, number = found.cut[-1]
        cut = Found(None, file, number, "Traceback (most recent call last), and its exception is cut off")
        title = "The log ends in the middle of a traceback."
        return Diagnosis(UNKNOWN, title, "", None, (cut,), (), "unknown", f"The rest of this log. {_EVERY_LOG}")
    if any(ends_well(tail) for tail in found.tail.values()):
        return _healthy(f"Nothing in {found.lines} lines tells of a failure.")
    said = f"nothing in {found.lines} lines tells how the job ended" if found.lines else "there is nothing in this log"
    return Diagnosis(UNKNOWN, f"No known failure found: {said}.", "", None, (), (), "unknown", _HOW_IT_ENDED)


def _line(line: Line, signature: Signature | None = None) -> Found:
    """The line as evidence; of a long one what `signature` matches, with what is around it."""
    found = signature.pattern.search(line.text) if signature and signature.text else None
    text, at = line.text, found.start() if found else 0
    if len(text) > MOST_OF_A_LINE and at > MOST_OF_A_LINE // 4:
        text = "… " + text[at - MOST_OF_A_LINE // 8 :].partition(" ")[2]
    return Found(line.rank, line.file, line.number, text[:2000])


def _healthy(why: str) -> Diagnosis:
    return Diagnosis(HEALTHY, why, "", None, (), (), "likely", "")
