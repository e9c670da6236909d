"""Says which rank is at fault, from what each rank wrote down: by the class of its failure first, by time only last.

torchrun blames the process that exited first. A rank that raises closes its sockets on the way out, so its peers can
fail, and exit, before it does. Hence: killed by torchrun, lost a peer, gave up waiting are consequences; only among
what is left does the earliest stamp count, and where every rank fails alike, none is "first".
"""

from __future__ import annotations

import errno
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ddpkit.runfolder.calls import Collective
from ddpkit.runfolder.failures import Failure
from ddpkit.runfolder.ranks import Rank

from .endings import (
    LEAVES,
    MET,
    Class,
    Ending,
    classify,
    common_deed,
    deed,
    failed_at,
    own_before,
    sent_by,
    tells_of_another,
    words_for,
)
from .finding import Finding, ranks_said, verb
from .flags import find_flag, find_nan
from .late import (
    came_after_all_had_given_up,
    gave_up_at,
    had_given_up_before,
    left_before_it_was_over,
    left_the_others_waiting,
)
from .mismatch import find_parting
from .standing import STILL_FROM_S, at_line, left_early, may_wait, same_line, standing, thread_died_of, unmoved_s
from .standstill import find

Culprit = int | tuple[int, ...] | Literal["every rank"] | None

TIE_NS = 1_000_000
# Sooner than torchrun looks whether a rank has failed; later the second may have been hurt by the first in ways not known.
TOGETHER_NS = 100_000_000
LEAVING_TAKES_NS = 3_000_000_000
# A rank that waits for less than so many of its own steps is in the middle of an ordinary one.
STEPS_MISSED = 2

# What may come of another rank's end without a word of it: through a file, a pipe or a queue.
_MAY_BE_PASSED_ON = {*LEAVES, "EOFError", "Empty", "TimeoutError", "KeyboardInterrupt"}

_OTHER_END_CLOSED = {"EOFError", "BrokenPipeError", "ConnectionResetError", "ConnectionRefusedError"}

# What the kernel refuses for what the process itself has or does; any other refusal may be over what ranks share.
_OF_THE_PROCESS = {errno.EMFILE, errno.EFBIG, errno.EBADF}


@dataclass(frozen=True)
class Verdict:
    """Who is at fault. `culprit`: a rank, several, "every rank", or None where nobody is or none can be told.

    `sentence` says it in a sentence or two ("" for a job that passed); `words` and `roles` tell it rank by rank.
    Roles: passed, culprit, own (failed by itself, but not the first), consequence, unknown. `kind` is one of `catalog.KINDS`.
    """

    culprit: Culprit
    sentence: str
    kind: str
    words: Mapping[int, str] = field(default_factory=dict)
    roles: Mapping[int, str] = field(default_factory=dict)


def judge(ranks: Sequence[Rank], ending: Ending) -> Verdict:
    """The verdict over one attempt of a job."""
    classes: dict[int, Class] = {r.rank: "gave_up" if _ended_its_own_wait(r, ranks) else classify(r) for r in ranks}
    own = [r for r in ranks if classes[r.rank] == "own"]
    flag = find_flag(own, ranks) or find_nan(own)
    told = [r.rank for r in own if (r.rank not in flag.ranks if flag else tells_of_another(r))]
    if len(told) < len(ranks):
        classes |= dict.fromkeys(told, "heard")
    culprit, sentence, kind = _as_found(flag, ranks) if flag else _find(ranks, classes, ending)
    at_fault = _as_ranks(culprit, ranks)
    words = {r.rank: words_for(r, classes[r.rank], ending, kind, r.rank in at_fault) for r in ranks}
    roles = {r.rank: "culprit" if r.rank in at_fault else _ROLES[classes[r.rank]] for r in ranks}
    if kind in ("sent_a_signal", "thread_died"):
        roles |= {r.rank: "consequence" for r in own if r.rank not in at_fault}
    return Verdict(culprit, sentence, kind, words, roles)


Found = tuple[Culprit, str, str]

_ROLES: dict[Class, str] = {
    "passed": "passed",
    "own": "own",
    "parted": "unknown",
    "peer_lost": "consequence",
    "gave_up": "consequence",
    "heard": "consequence",
    "told": "consequence",
    "unknown": "unknown",
}


def _find(ranks: Sequence[Rank], classes: Mapping[int, Class], ending: Ending) -> Found:
    of = {kind: [r for r in ranks if classes[r.rank] == kind] for kind in _ROLES}
    if of["own"]:
        return _sent_a_signal(of["own"], ranks) or _lost_a_thread(of["own"], ranks) or _among_own(of["own"], len(ranks))
    if of["parted"]:
        return _as_found(find_parting(ranks), ranks)
    if ending.reason:
        return _of_an_ended_job(ranks, ending)
    if ending.agent_signal:
        killed = f"torchrun itself was killed by {ending.agent_signal}; its ranks were ended after it."
        return None, killed, "agent_killed"
    if hurt := of["peer_lost"] + of["gave_up"] + of["heard"]:
        return _among_hurt(ranks, hurt, classes)
    if ranks and len(of["passed"]) == len(ranks):
        if ending.agent_exitcode:
            return None, f"Every rank passed, but torchrun failed: {ending.agent_error}", "agent_failed"
        return None, "", "passed"
    if not ranks:
        said = ending.agent_error or "it says nothing more"
        return None, f"torchrun ended before any rank had started: {said}", "agent_failed"
    lost = [r.rank for r in of["unknown"] if r.exitcode is None]
    if lost and ending.agent_exitcode:
        parent = (
            f"as when {verb(lost, 'its', 'their')} parent process is killed (without ddpkit that is torchrun itself)"
        )
        return None, f"Nothing says how {ranks_said(lost).lower()} ended, {parent}.", "unknown"
    unclear = "No rank failed by itself, and how they ended is not fully recorded: the culprit cannot be told."
    return None, unclear, "unknown"


def _ended_its_own_wait(rank: Rank, ranks: Sequence[Rank]) -> bool:
    """Whether this rank was ended by a guard of the program's own, a thread that leaves, a limit for asking whether a collective
    is over or an alarm, while it waited in vain for a rank that had not joined by then."""
    at, failure = standing(rank), rank.failure
    if failure and failure.type in ("SIGALRM", "dump_traceback_later"):
        return may_wait(failure.frames) and any(_was_elsewhere(r, failure) for r in ranks)
    if failure is None or not (failure.type in LEAVES or "Timeout" in failure.type) or classify(rank) != "own":
        return False
    if at.pairwise:
        began = rank.calls[-1] if rank.calls and rank.calls[-1].is_exchange else None
        return failure.by_thread and began is not None and _s_before(failure, began) >= STILL_FROM_S
    waits_in = at.collective
    if waits_in is None or _s_before(failure, waits_in) < STILL_FROM_S:
        return False
    others = [r for r in ranks if r is not rank and (not waits_in.ranks or r.rank in waits_in.ranks)]
    came = [
        r
        for r in others
        if any(c.key == waits_in.key and c.matches(waits_in) and c.at_ns < failure.at_ns for c in r.collectives)
    ]
    return len(came) < len(others)


def _was_elsewhere(rank: Rank, failure: Failure) -> bool:
    """Whether this rank had come to no collective for a while before `failure`, and waited in none, or at another line."""
    at, last = standing(rank), rank.collectives[-1] if rank.collectives else None
    if last is None or _s_before(failure, last) < STILL_FROM_S:
        return False
    return at.kind not in ("waiting", "joining") or not same_line(at.place, failure.where)


def _s_before(failure: Failure, call: Collective) -> float:
    return (failure.at_ns - call.at_ns) / 1e9


def _as_found(finding: Finding, ranks: Sequence[Rank], more: str = "") -> Found:
    numbers = finding.ranks
    culprit: Culprit = None
    if len(numbers) == 1:
        culprit = numbers[0]
    elif numbers:
        culprit = "every rank" if len(numbers) == len(ranks) else numbers
    return culprit, f"{finding.sentence} {more}".strip(), finding.kind


def _sent_a_signal(own: Sequence[Rank], ranks: Sequence[Rank]) -> Found | None:
    """The first rank to fail, and the one that sent it the signal that it died of: which of them is right, a guard that ends who
    takes too much memory or one that has another's number, the program's author knows."""
    first = min(own, key=failed_at)
    sent = sent_by(first, first.signal or "", ranks)
    if sent is None:
        return None
    both = tuple(sorted((sent[0], first.rank)))
    return both, f"Rank {sent[0]} sent {first.signal} to rank {first.rank}{sent[1]}.", "sent_a_signal"


def _lost_a_thread(own: Sequence[Rank], ranks: Sequence[Rank]) -> Found | None:
    """The one rank of which a thread has died of an exception, where all that ranks raised themselves is that the other end of a
    pipe or a socket was closed."""
    died = {r.rank: died_of for r in ranks if (died_of := thread_died_of(r))}
    closed = all(r.failure and r.failure.type in _OTHER_END_CLOSED for r in own)
    if not closed or len(died) != 1 or any(r.rank in died for r in own):
        return None
    ((number, died_of),) = died.items()
    first = min(own, key=failed_at)
    return number, f"A thread of rank {number} has died of {died_of}; rank {first.rank} {deed(first)}.", "thread_died"


def _among_own(own: Sequence[Rank], world_size: int) -> Found:
    """Ranks that failed by their own fault: all alike, or the earliest, or a tie."""
    by_time = sorted(own, key=failed_at)
    first = by_time[0]
    if len(own) == 1:
        return first.rank, f"Rank {first.rank} {deed(first)}.", "own"
    if len(own) == world_size and (finding := left_the_others_waiting(own)):
        return finding.ranks[0], finding.sentence, finding.kind
    if any(len(set(map(likeness, own))) == 1 for likeness in (_line_and_type, _words_of_a_library)):
        # The lowest rank speaks for all: whose text is quoted must not depend on a race.
        numbers = tuple(sorted(r.rank for r in own))
        did = common_deed(sorted(own, key=lambda r: r.rank))
        if len(own) == world_size:
            return "every rank", f"Every rank alike {did}.", "own"
        return numbers, f"{ranks_said(numbers)} alike {re.sub('^was ', 'were ', did)}.", "own"
    if spoke := _spoke_within(by_time, failed_at(first) + LEAVING_TAKES_NS):
        beside = f"rank {first.rank} {deed(first)} at about that time"
        return spoke.rank, f"Rank {spoke.rank} {deed(spoke)}; {beside}.", "own"
    if unhurt := [rank for rank in by_time[1:] if _unhurt_by(first, rank)]:
        alike = {*map(_line_and_type, unhurt)}
        unhurt = [rank for rank in by_time[1:] if rank in unhurt or _line_and_type(rank) in alike]
        at_fault = sorted((first, *unhurt), key=lambda r: r.rank)
        numbers = tuple(r.rank for r in at_fault)
        did = "; ".join(f"rank {r.rank} {deed(r)}" for r in at_fault)
        return "every rank" if len(numbers) == world_size else numbers, f"R{did[1:]}: each by itself.", "own"
    second = by_time[1]
    if failed_at(second) - failed_at(first) < TIE_NS and not (first.failure and first.failure.let_go):
        pair = sorted((first, second), key=lambda r: r.rank)
        tied = ", and ".join(f"rank {r.rank} {deed(r)}" for r in pair)
        return None, f"A tie: {tied}, within a millisecond.", "tie"
    return first.rank, f"Rank {first.rank} {deed(first)}; later rank {second.rank} {deed(second)}.", "own"


def _unhurt_by(first: Rank, rank: Rank) -> bool:
    """Whether `rank` raised by itself for all that is known: right after `first`, in no exchange, in no collective that `first`
    had not joined, and over nothing that ranks may share."""
    failure, joined = rank.failure, {call.key for call in first.calls}
    if failed_at(rank) - failed_at(first) > TOGETHER_NS:
        return False
    if failure is None or failure.type in (rank.signal, *_MAY_BE_PASSED_ON):
        return False
    if failure.errno is not None and failure.errno not in _OF_THE_PROCESS:
        return False
    return not any(call.is_exchange or not call.done or call.key not in joined for call in rank.calls[-1:])


def _spoke_within(by_time: Sequence[Rank], until_ns: int) -> Rank | None:
    """Where the first to fail left by a bare exit code, which tells nothing: who by then died of a signal or an exception.

    A program that catches the loss of a peer and leaves by `os._exit(1)` can be gone before the peer has quite ended.
    """
    told = [rank for rank in by_time if rank.failure and (rank.failure.type != "os._exit" or rank.failure.chain)]
    if by_time[0] in told:
        return None
    return next((rank for rank in told if failed_at(rank) <= until_ns), None)


def _among_hurt(ranks: Sequence[Rank], hurt: Sequence[Rank], classes: Mapping[int, Class]) -> Found:
    """Only consequences were recorded: what was found when the first of them was hurt says whom it waited for."""
    # A rank that never started is not among them.
    of = {r.rank: r for r in ranks}
    # Who gives up closes its connections, and tells of it a moment later: another rank may have told of their loss by then.
    hurt_at = {r.rank: gave_up_at(r) if classes[r.rank] == "gave_up" else failed_at(r) for r in hurt}
    victim = min(hurt, key=lambda r: hurt_at[r.rank])
    if victim.failure and (named := victim.failure.at_fault):
        return named[0] if len(named) == 1 else named, f"Rank {victim.rank} {deed(victim)}.", "told_by_others"
    if all(classes[r.rank] == "heard" for r in hurt):
        return _not_told(ranks, hurt)
    met = MET[classes[victim.rank]]
    where = f" at {victim.failure.line_text}" if victim.failure and victim.failure.line_text else ""
    finding = _whom_it_waited_for(victim, ranks, hurt_at[victim.rank] if classes[victim.rank] == "gave_up" else None)
    raised = {rank.rank: earlier for rank in hurt if (earlier := own_before(rank))}
    if len(raised) == 1 and (not finding or finding.ranks in ((), tuple(raised))):
        number, earlier = raised.popitem()
        last = of[number].failure
        there = f" ({last.line_text})" if last and last.line_text else ""
        return (
            number,
            f"Rank {number} raised {earlier} and, on its way out, waited for the others in vain{there}.",
            "own",
        )
    if finding and finding.ranks:
        return _as_found(finding, ranks)
    # A process closes its sockets a moment before it has ended, so the victim may be stamped first.
    by_then = failed_at(victim) + LEAVING_TAKES_NS
    left = tuple(r.rank for r in ranks if classes[r.rank] == "passed" and (r.ended_ns or 0) <= by_then)
    if standing(victim).pairwise and (peers := [n for n in left if n in victim.requested]):
        left = tuple(peers)
    if left:
        who: Culprit = left[0] if len(left) == 1 else left
        sentence = f"{ranks_said(left)} {left_early(of[left[0]])}; rank {victim.rank} {met}{where}."
        return who, sentence, "left_early"
    if finding and finding.kind in ("mismatch", "all_waiting", "stale_addresses"):
        return _as_found(finding, ranks)
    unclear = f"Rank {victim.rank} {met}{where}, and no rank failed by itself: the culprit cannot be told from this."
    return None, unclear, classes[victim.rank]


def _whom_it_waited_for(victim: Rank, ranks: Sequence[Rank], gave_up_ns: int | None) -> Finding | None:
    """Who held up the victim, which gave up at `gave_up_ns`, or else has lost a peer."""
    finding = had_given_up_before(victim, ranks) or came_after_all_had_given_up(victim, ranks)
    if not finding and gave_up_ns is None:
        finding = left_before_it_was_over(victim, ranks)
    return finding or find(ranks, at_ns=gave_up_ns)


def _not_told(ranks: Sequence[Rank], told: Sequence[Rank]) -> Found:
    """Whoever has not raised that another rank had failed, where nothing but that was raised; of several that torchrun ended,
    some may only have been about to."""
    others = [r for r in ranks if r not in told]
    numbers = tuple(r.rank for r in others)
    told_that = f"{ranks_said([r.rank for r in told])} {common_deed(told)}"
    place = at_line(standing(others[0]))
    does = f"left with exit code 0{place}" if others[0].exitcode == 0 else f"{verb(others, 'was', 'were')} ended{place}"
    sentence = f"{told_that}; {ranks_said(numbers).lower()} raised nothing and {does}"
    if len(others) > 1 and any(r.told for r in others):
        return None, f"{sentence}. Which of them failed cannot be told from this.", "unknown"
    return numbers[0] if len(others) == 1 else numbers, f"{sentence}.", "told_by_others"


def _of_an_ended_job(ranks: Sequence[Rank], ending: Ending) -> Found:
    """ddpkit ended the job: who held it up, if nothing moved by then; otherwise nobody is named."""
    ranks = _as_found_before(ranks)
    why, looked_at = _why_ended(ending), [r for r in ranks if r.look]
    waiting = [r for r in looked_at if standing(r).kind in ("waiting", "joining")]
    finding = find(ranks)
    still_from_s = max(STILL_FROM_S, STEPS_MISSED * _longest_step_s(ranks))
    if finding and finding.kind != "busy" and all(unmoved_s(r) >= still_from_s for r in waiting or looked_at):
        return _as_found(finding, ranks, why)
    if finding and ending.reason == "stall":
        return _as_found(finding, ranks, why)
    return None, why, {"timeout": "timed_out", "stall": "unknown"}.get(ending.reason, "ended")


def _as_found_before(ranks: Sequence[Rank]) -> list[Rank]:
    """The ranks as they were when nothing moved: as one is ended, another may lose it, or go on, before its own end comes."""
    told_ns = [r.told_ns for r in ranks if r.told]
    return [
        replace(r, failure=None, exitcode=None) if told_ns and r.look and failed_at(r) >= min(told_ns) else r
        for r in ranks
    ]


def _longest_step_s(ranks: Sequence[Rank]) -> float:
    """The longest time between one collective and the next, of any rank."""
    joined = ([c.at_ns for c in rank.collectives] for rank in ranks)
    return max((after - before for each in joined for before, after in itertools.pairwise(each)), default=0) / 1e9


def _why_ended(ending: Ending) -> str:
    if ending.reason == "timeout":
        return f"The job ran longer than timeout={ending.timeout_s:g} s and was ended."
    if ending.reason == "stall":
        return f"No rank made progress for stall={ending.stall_s:g} s and the job was ended."
    return "The job was stopped."


def _line_and_type(rank: Rank) -> tuple[object, ...]:
    """What is the same for ranks that the same exception came to in the same line; the rank's own number in the text aside."""
    if rank.failure is None:
        return ("exit", rank.exitcode)
    where = rank.failure.where
    return (rank.failure.type, (where.file, where.line) if where else None)


def _words_of_a_library(rank: Rank) -> tuple[object, ...]:
    """What is the same for ranks that the same line of a library raised the same words to, from whichever of their own."""
    failure = rank.failure
    if failure is None or not failure.frames or failure.frames[-1].own:
        return (rank.rank,)
    return (failure.text, failure.frames[-1].file, failure.frames[-1].line)


def _as_ranks(culprit: Culprit, ranks: Sequence[Rank]) -> tuple[int, ...]:
    if culprit == "every rank":
        return tuple(r.rank for r in ranks)
    if culprit is None:
        return ()
    return (culprit,) if isinstance(culprit, int) else tuple(culprit)
