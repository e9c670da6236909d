"""Says which rank is at fault, from what each rank wrote down: by the class of its failure first, by time only last.

torchrun blames the process that exited first. A rank that raises closes its sockets on the way out, so its peers can
fail, and exit, before it does. Hence: killed by torchrun, lost a peer, gave up waiting are consequences; only among
what is left does the earliest stamp count, and where every rank fails alike, none is "first".
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .finding import Finding, ranks_said, verb
from .mismatch import find_parting
from .records import Failure, Rank
from .stable import stable
from .standing import standing, unmoved_s
from .standstill import find

Class = Literal["passed", "own", "parted", "peer_lost", "gave_up", "told", "unknown"]
Culprit = int | tuple[int, ...] | Literal["every rank"] | None

TIE_NS = 1_000_000
# Sooner than torchrun looks whether a rank has failed; later the second may have been hurt by the first in ways not known.
TOGETHER_NS = 100_000_000
LEAVING_TAKES_NS = 3_000_000_000
GIVING_UP_TAKES_NS = 500_000_000
# A rank that waits for less than this, or for less than so many of its own steps, is in the middle of an ordinary one.
STILL_FROM_S = 2.0
STEPS_MISSED = 2

_PEER_LOST = re.compile(
    r"gloo/transport/.*(closed by peer|reset by peer|Broken pipe)"
    r"|DistNetworkError: (Broken pipe|Connection reset by peer)"  # of a store
    r"|Application timeout caused pair closure"
    r"|ncclRemoteError|remote process exited or there was a network error"
    r"|Connection was likely closed\. Did the remote server shutdown or crash"
    r"|connectFullMesh failed.*Connection refused"
    r"|setup: rank \d+ failed in its setup"  # ddpkit.rank.setup, of another rank
    r"|Detected at least one rank that exhausted inputs\. Throwing across all ranks",
    re.DOTALL,
)
_GAVE_UP = re.compile(
    r"Timed out waiting \d+ms for (recv|send) operation"
    r"|RuntimeError: Operation timed out!"
    r"|Watchdog caught collective operation timeout"
    r"|wait timeout after \d+ms, keys"
    r"|RuntimeError: Wait timeout$"  # of a store in a file
    r"|DistStoreError: Socket Timeout$"  # of torch 2.4
    r"|client socket has timed out"
    r"|waiting for clients\. \d+/\d+ clients joined"
    r"|failed to pass monitoredBarrier"
)
_WAITED = re.compile(r"Timed out waiting (\d+)ms for (?:recv|send) operation")
# torch.distributed.checkpoint raises on every rank what it met on some; with `reduce_fun`, what came of them all together.
_FAILED_IN_CHECKPOINT = re.compile(
    r"^CheckpointException ranks:dict_keys\(\[([\d, ]+)\]\)(?!.*reduce_fun\()", re.DOTALL
)
# No connection was lost: Join(throw_on_early_termination=True), and a checkpoint.
_TOLD_OF = {"ended": re.compile(r"Detected at least one rank that exhausted inputs"), "failed": _FAILED_IN_CHECKPOINT}
# Two ranks met in different collectives; which of them is wrong, neither text says.
_PARTED = re.compile(
    r"op\.preamble\.length <= op\.nbytes"
    r"|Detected mismatch between collectives on ranks"
    r"|Error when verifying shape tensors for collective"
    r"|appears not to match (sizes|strides) of the same param in process 0"
    r"|DDP expects same model across all ranks"
)

# What may come of another rank's end without a word of it: through a file, a pipe or a queue.
_MAY_BE_PASSED_ON = {"SystemExit", "EOFError", "Empty", "TimeoutError", "KeyboardInterrupt"}

# What a program catches in the ordinary course of things, and goes on.
_ORDINARY = {"StopIteration", "KeyError", "Empty"}


@dataclass(frozen=True)
class Verdict:
    """Who is at fault. `culprit`: a rank, several, "every rank", or None where nobody is or none can be told.

    `sentence` says it in a sentence or two ("" for a job that passed); `words` and `roles` tell it rank by rank.
    Roles: passed, culprit, own (failed by itself, but not the first), consequence, unknown. `kind` is passed, own, tie,
    left_early, never_joined, straggler, mismatch, shapes_differ, stopped_process, loader_stuck, loader_dead,
    told_by_others, init_waiting, init_elsewhere, stale_addresses, all_waiting, stuck, busy, silent, agent_killed, agent_failed,
    peer_lost, gave_up, ended, timed_out or unknown.
    """

    culprit: Culprit
    sentence: str
    kind: str
    words: Mapping[int, str] = field(default_factory=dict)
    roles: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ending:
    """How the job as a whole ended, as far as ddpkit and torchrun's agent know.

    `reason`: "" (by itself), "stopped", "timeout" or "stall"; `agent_signal`: the signal that killed the agent, if one did.
    """

    reason: str = ""
    agent_exitcode: int | None = 0
    agent_signal: str | None = None
    agent_error: str = ""
    timeout_s: float | None = None
    stall_s: float | None = None


def classify(rank: Rank) -> Class:
    """The class of this rank's end."""
    if rank.exitcode == 0:
        return "passed"
    if rank.failure and not (rank.told and rank.told_ns < rank.failure.at_ns):
        return classify_failure(rank.failure, rank)
    if rank.told:
        return "told"
    return "own" if rank.exitcode is not None else "unknown"


def classify_failure(failure: Failure, rank: Rank) -> Class:
    """Whether `failure` is the rank's own, or what a peer's end or silence did to it."""
    if failure.at_fault and rank.rank not in failure.at_fault:
        return "gave_up"
    texts = [f"{failure.type}: {failure.message}", *(f"{kind}: {message}" for kind, message in failure.chain)]
    if failure.type == "SIGABRT":
        # A C++ thread that meets a closed connection aborts the process; its last words are on stderr only.
        texts.append(rank.stderr[-4_000:])
    # Or crashes on its way to that, while other threads still run.
    if failure.type == "SIGSEGV" and _PARTED.search(rank.stderr[-4_000:]):
        return "parted"
    failed = _FAILED_IN_CHECKPOINT.match(failure.message)
    if failed and str(rank.rank) not in failed[1].split(", "):
        return "peer_lost"
    if any(_PARTED.search(text) for text in texts):
        return "parted"
    if any(_PEER_LOST.search(text) for text in texts):
        return "peer_lost"
    if any(_GAVE_UP.search(text) for text in texts):
        return "gave_up"
    return "own"


def judge(ranks: Sequence[Rank], ending: Ending) -> Verdict:
    """The verdict over one attempt of a job."""
    classes = {r.rank: classify(r) for r in ranks}
    culprit, sentence, kind = _find(ranks, classes, ending)
    at_fault = _as_ranks(culprit, ranks)
    words = {r.rank: _words(r, classes[r.rank], ending, kind, r.rank in at_fault) for r in ranks}
    roles = {r.rank: "culprit" if r.rank in at_fault else _ROLES[classes[r.rank]] for r in ranks}
    return Verdict(culprit, sentence, kind, words, roles)


Found = tuple[Culprit, str, str]

_ROLES: dict[Class, str] = {
    "passed": "passed",
    "own": "own",
    "parted": "unknown",
    "peer_lost": "consequence",
    "gave_up": "consequence",
    "told": "consequence",
    "unknown": "unknown",
}


def _find(ranks: Sequence[Rank], classes: Mapping[int, Class], ending: Ending) -> Found:
    of = {kind: [r for r in ranks if classes[r.rank] == kind] for kind in _ROLES}
    if of["own"]:
        return _among_own(of["own"], len(ranks))
    if of["parted"]:
        return _as_found(find_parting(ranks), ranks)
    if ending.reason:
        return _of_an_ended_job(ranks, ending)
    if ending.agent_signal:
        killed = f"torchrun itself was killed by {ending.agent_signal}; its ranks were ended after it."
        return None, killed, "agent_killed"
    if hurt := of["peer_lost"] + of["gave_up"]:
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


def _as_found(finding: Finding, ranks: Sequence[Rank], more: str = "") -> Found:
    numbers = finding.ranks
    culprit: Culprit = None
    if len(numbers) == 1:
        culprit = numbers[0]
    elif numbers:
        culprit = "every rank" if len(numbers) == len(ranks) else numbers
    return culprit, f"{finding.sentence} {more}".strip(), finding.kind


def _among_own(own: Sequence[Rank], world_size: int) -> Found:
    """Ranks that failed by their own fault: all alike, or the earliest, or a tie."""
    by_time = sorted(own, key=_failed_at)
    first = by_time[0]
    if len(own) == 1:
        return first.rank, f"Rank {first.rank} {_did(first)}.", "own"
    if any(len(set(map(likeness, own))) == 1 for likeness in (_line_and_type, _words_of_a_library)):
        # The lowest rank speaks for all: whose text is quoted must not depend on a race.
        numbers = tuple(sorted(r.rank for r in own))
        did = _did_alike(sorted(own, key=lambda r: r.rank))
        if len(own) == world_size:
            return "every rank", f"Every rank alike {did}.", "own"
        return numbers, f"{ranks_said(numbers)} alike {did}.", "own"
    if spoke := _spoke_within(by_time, _failed_at(first) + LEAVING_TAKES_NS):
        beside = f"rank {first.rank} {_did(first)} at about that time"
        return spoke.rank, f"Rank {spoke.rank} {_did(spoke)}; {beside}.", "own"
    if unhurt := [rank for rank in by_time[1:] if _unhurt_by(first, rank)]:
        at_fault = sorted((first, *unhurt), key=lambda r: r.rank)
        numbers = tuple(r.rank for r in at_fault)
        did = "; ".join(f"rank {r.rank} {_did(r)}" for r in at_fault)
        return "every rank" if len(numbers) == world_size else numbers, f"R{did[1:]}: each by itself.", "own"
    second = by_time[1]
    if _failed_at(second) - _failed_at(first) < TIE_NS:
        pair = sorted((first, second), key=lambda r: r.rank)
        tied = ", and ".join(f"rank {r.rank} {_did(r)}" for r in pair)
        return None, f"A tie: {tied}, within a millisecond.", "tie"
    return first.rank, f"Rank {first.rank} {_did(first)}; later rank {second.rank} {_did(second)}.", "own"


def _unhurt_by(first: Rank, rank: Rank) -> bool:
    """Whether `rank` raised by itself for all that is known: right after `first`, in no exchange, in no collective that `first`
    had not joined, and over nothing that ranks may share."""
    failure, joined = rank.failure, {call.key for call in first.calls}
    if _failed_at(rank) - _failed_at(first) > TOGETHER_NS:
        return False
    if failure is None or failure.type == rank.signal or failure.type in _MAY_BE_PASSED_ON or failure.errno is not None:
        return False
    return not any(call.is_exchange or not call.done or call.key not in joined for call in rank.calls[-1:])


def _spoke_within(by_time: Sequence[Rank], until_ns: int) -> Rank | None:
    """Where the first to fail left by a bare exit code, which tells nothing: who by then died of a signal or an exception.

    A program that catches the loss of a peer and leaves by `os._exit(1)` can be gone before the peer has quite ended.
    """
    if by_time[0].failure is not None:
        return None
    return next((rank for rank in by_time if rank.failure is not None and _failed_at(rank) <= until_ns), None)


def _among_hurt(ranks: Sequence[Rank], hurt: Sequence[Rank], classes: Mapping[int, Class]) -> Found:
    """Only consequences were recorded: what was found when the first of them was hurt says whom it waited for."""
    victim = min(hurt, key=_failed_at)
    if victim.failure and (named := victim.failure.at_fault):
        return named[0] if len(named) == 1 else named, f"Rank {victim.rank} {_did(victim)}.", "told_by_others"
    met = "lost its peer" if classes[victim.rank] == "peer_lost" else "gave up waiting"
    where = f" at {victim.failure.line_text}" if victim.failure and victim.failure.line_text else ""
    finding = find(ranks, at_ns=_gave_up_at(victim) if classes[victim.rank] == "gave_up" else None)
    raised = {rank.rank: earlier for rank in hurt if (earlier := _own_before(rank))}
    if len(raised) == 1 and (not finding or finding.ranks in ((), tuple(raised))):
        number, earlier = raised.popitem()
        last = ranks[number].failure
        there = f" ({last.line_text})" if last and last.line_text else ""
        return (
            number,
            f"Rank {number} raised {earlier} and, on its way out, waited for the others in vain{there}.",
            "own",
        )
    if finding and finding.ranks:
        return _as_found(finding, ranks)
    # A process closes its sockets a moment before it has ended, so the victim may be stamped first.
    by_then = _failed_at(victim) + LEAVING_TAKES_NS
    left = tuple(r.rank for r in ranks if classes[r.rank] == "passed" and (r.ended_ns or 0) <= by_then)
    if standing(victim).pairwise and (peers := [n for n in left if n in victim.requested]):
        left = tuple(peers)
    if left:
        who: Culprit = left[0] if len(left) == 1 else left
        sentence = f"{ranks_said(left)} left early with exit code 0; rank {victim.rank} {met}{where}."
        return who, sentence, "left_early"
    if finding and finding.kind in ("mismatch", "all_waiting", "stale_addresses"):
        return _as_found(finding, ranks)
    unclear = f"Rank {victim.rank} {met}{where}, and no rank failed by itself: the culprit cannot be told from this."
    return None, unclear, classes[victim.rank]


def _gave_up_at(rank: Rank) -> int:
    """When this rank gave up waiting; a program may catch that, write a report, and raise it long after."""
    waited, said = standing(rank).collective, _WAITED.search(rank.failure.message) if rank.failure else None
    if said and waited and waited is rank.collectives[-1]:
        return min(_failed_at(rank), waited.at_ns + int(said[1]) * 1_000_000 + GIVING_UP_TAKES_NS)
    return _failed_at(rank)


def _own_before(rank: Rank) -> str:
    """What this rank had raised by itself before it met its last exception, in a `finally` say; "" where nothing."""
    chain = rank.failure.chain if rank.failure else ()
    suffered = (_PARTED, _PEER_LOST, _GAVE_UP)
    told = ((kind, f"{kind}: {text}") for kind, text in reversed(chain) if kind not in _ORDINARY)
    own = (text for _kind, text in told if not any(pattern.search(text) for pattern in suffered))
    return stable(next(own, "")).strip()


def _of_an_ended_job(ranks: Sequence[Rank], ending: Ending) -> Found:
    """ddpkit ended the job: who held it up, if nothing moved by then; otherwise nobody is named."""
    why, looked_at = _why_ended(ending), [r for r in ranks if r.look]
    waiting = [r for r in looked_at if standing(r).kind in ("waiting", "joining")]
    finding = find(ranks)
    still_from_s = max(STILL_FROM_S, STEPS_MISSED * _longest_step_s(ranks))
    if finding and finding.kind != "busy" and all(unmoved_s(r) >= still_from_s for r in waiting or looked_at):
        return _as_found(finding, ranks, why)
    if finding and ending.reason == "stall":
        return _as_found(finding, ranks, why)
    return None, why, {"timeout": "timed_out", "stall": "unknown"}.get(ending.reason, "ended")


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


def _failed_at(rank: Rank) -> int:
    return rank.failure.at_ns if rank.failure else rank.ended_ns or 0


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


def _did(rank: Rank) -> str:
    """`raised ValueError: boom (line 7: raise ValueError("boom"))`."""
    failure = rank.failure
    if failure is None:
        return f"exited with code {rank.exitcode}" if (rank.exitcode or 0) > 0 else _killed(rank)
    place = f" ({failure.line_text})" if failure.line_text else ""
    if rank.signal and failure.type == rank.signal:
        return _killed(rank) + place
    if failure.type == "SystemExit":
        handled = f", while it handled {': '.join(failure.chain[0]).rstrip('.')}" if failure.chain else ""
        return f"left by sys.exit, {stable(failure.message).strip()}{place}{stable(handled)}"
    return f"raised {failure.text.rstrip('.')}{place}"


def _did_alike(ranks: Sequence[Rank]) -> str:
    """What these ranks did, in the words of the lowest; said to be its own where the others' words differ."""
    first, failure = ranks[0], ranks[0].failure
    if failure is None or len({r.failure.text for r in ranks if r.failure}) == 1:
        return _did(first)
    return f"raised {failure.type}, rank {first.rank} this: {_did(first).removeprefix('raised ')}"


def _killed(rank: Rank) -> str:
    if rank.oom:
        return f"was killed by the kernel for want of memory ({stable(rank.oom)})"
    if rank.signal == "SIGKILL":
        return "was killed by SIGKILL, not sent by torchrun (by hand, or by the kernel for want of memory)"
    if rank.finished_ns:
        return f"was killed by {rank.signal} while Python shut down, after its script had come to its end"
    return f"was killed by {rank.signal}"


def _words(rank: Rank, end: Class, ending: Ending, kind: str, at_fault: bool) -> str:
    """A few words for the header of the rank's lane; `kind` is the verdict's."""
    if end == "passed":
        return "left early, exit code 0" if at_fault else "passed"
    if end in ("peer_lost", "gave_up"):
        met = "gave up waiting" if end == "gave_up" else "lost its peer"
        for what, pattern in _TOLD_OF.items():
            if rank.failure and pattern.search(rank.failure.message):
                met = f"was told that a rank had {what}"
        return f"{met}: a consequence" if not at_fault else "came too late" if kind == "straggler" else met
    if end == "parted":
        return "met another model" if kind == "shapes_differ" else "met another collective"
    if end == "told":
        return _words_of_told(rank, ending)
    return plain_words(rank)


def _words_of_told(rank: Rank, ending: Ending) -> str:
    by = {"stopped": "stopped", "timeout": "ended at the timeout", "stall": "ended at the stall"}.get(ending.reason)
    if rank.killed_for.startswith("it ignored"):
        return f"{rank.killed_for.removeprefix('it ')}, then ended by SIGKILL"
    return by or ("ended after torchrun's death" if ending.agent_signal else "ended by torchrun")


def plain_words(rank: Rank) -> str:
    """What happened to the rank, without saying whose fault it was."""
    if rank.failure and rank.failure.type == "SystemExit":
        return f"left by sys.exit, exit code {rank.exitcode}"
    if rank.failure and rank.failure.type != rank.signal:
        return f"raised {rank.failure.type}"
    if rank.signal:
        return f"ended by {rank.signal}" if rank.told else f"killed by {rank.signal}"
    if rank.exitcode is None:
        return "how it ended is not recorded"
    return "passed" if rank.exitcode == 0 else f"exited with code {rank.exitcode}"


def _as_ranks(culprit: Culprit, ranks: Sequence[Rank]) -> tuple[int, ...]:
    if culprit == "every rank":
        return tuple(r.rank for r in ranks)
    if culprit is None:
        return ()
    return (culprit,) if isinstance(culprit, int) else tuple(culprit)
