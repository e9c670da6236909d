"""Says which rank is at fault, from what each rank wrote down: by the class of its failure first, by time only last.

torchrun blames the process that exited first. A rank that raises closes its sockets on the way out, so its peers can
fail, and exit, before it does. Hence: killed by torchrun, lost a peer, gave up waiting are consequences; only among
what is left does the earliest stamp count, and where every rank fails alike, none is "first".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .records import Failure, Rank
from .stable import stable

Class = Literal["passed", "own", "peer_lost", "gave_up", "told", "unknown"]
Culprit = int | tuple[int, ...] | Literal["every rank"] | None

TIE_NS = 1_000_000
LEAVING_TAKES_NS = 3_000_000_000

_PEER_LOST = re.compile(
    r"gloo/transport/.*(closed by peer|reset by peer|Broken pipe)"
    r"|Application timeout caused pair closure"
    r"|ncclRemoteError|remote process exited or there was a network error"
    r"|Connection was likely closed\. Did the remote server shutdown or crash",
    re.DOTALL,
)
_GAVE_UP = re.compile(
    r"Timed out waiting \d+ms for (recv|send) operation"
    r"|Watchdog caught collective operation timeout"
    r"|wait timeout after \d+ms, keys"
    r"|client socket has timed out"
)
_WAITING = re.compile(r"torch/distributed/|_engine_run_backward")


@dataclass(frozen=True)
class Verdict:
    """Who is at fault. `culprit`: a rank, several that failed alike, "every rank", or None where nobody is or none can be told.

    `sentence` says it in one sentence ("" for a job that passed); `words` and `roles` tell it rank by rank.
    Roles: passed, culprit, own (failed by itself, but not the first), consequence, unknown.
    """

    culprit: Culprit
    sentence: str
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
    texts = [failure.message, *(message for _, message in failure.chain)]
    if failure.type == "SIGABRT":
        # A C++ thread that meets a closed connection aborts the process; its last words are on stderr only.
        texts.append(rank.stderr[-4_000:])
    if any(_PEER_LOST.search(text) for text in texts):
        return "peer_lost"
    if any(_GAVE_UP.search(text) for text in texts):
        return "gave_up"
    return "own"


def judge(ranks: Sequence[Rank], ending: Ending) -> Verdict:
    """The verdict over one attempt of a job."""
    classes = {r.rank: classify(r) for r in ranks}
    culprit, sentence = _find(ranks, classes, ending)
    at_fault = _as_ranks(culprit, ranks)
    words = {r.rank: _words(r, classes[r.rank], ending, r.rank in at_fault) for r in ranks}
    roles = {r.rank: "culprit" if r.rank in at_fault else _ROLES[classes[r.rank]] for r in ranks}
    return Verdict(culprit, sentence, words, roles)


_ROLES: dict[Class, str] = {
    "passed": "passed",
    "own": "own",
    "peer_lost": "consequence",
    "gave_up": "consequence",
    "told": "consequence",
    "unknown": "unknown",
}


def _find(ranks: Sequence[Rank], classes: Mapping[int, Class], ending: Ending) -> tuple[Culprit, str]:
    own = [r for r in ranks if classes[r.rank] == "own"]
    if own:
        return _among_own(own, len(ranks))
    if ending.reason:
        return _of_an_ended_job(ranks, classes, ending)
    if ending.agent_signal:
        return None, f"torchrun itself was killed by {ending.agent_signal}; its ranks were ended after it."
    hurt = [r for r in ranks if classes[r.rank] in ("peer_lost", "gave_up")]
    if hurt:
        return _among_hurt(ranks, hurt, classes)
    if ranks and all(classes[r.rank] == "passed" for r in ranks):
        return (
            None,
            "" if not ending.agent_exitcode else f"Every rank passed, but torchrun failed: {ending.agent_error}",
        )
    if not ranks:
        return None, f"torchrun ended before any rank had started: {ending.agent_error or 'it says nothing more'}"
    return None, "No rank failed by itself, and how they ended is not fully recorded: the culprit cannot be told."


def _among_own(own: Sequence[Rank], world_size: int) -> tuple[Culprit, str]:
    """Ranks that failed by their own fault: all alike, or the earliest, or a tie."""
    by_time = sorted(own, key=_failed_at)
    first = by_time[0]
    if len(own) == 1:
        return first.rank, f"Rank {first.rank} {_did(first)}."
    if len({_likeness(r) for r in own}) == 1:
        # The lowest rank speaks for all: whose text is quoted must not depend on a race.
        numbers = tuple(sorted(r.rank for r in own))
        did = _did(min(own, key=lambda r: r.rank))
        if len(own) == world_size:
            return "every rank", f"Every rank alike {did}."
        return numbers, f"{_ranks_said(numbers)} alike {did}."
    second = by_time[1]
    if _failed_at(second) - _failed_at(first) < TIE_NS:
        pair = sorted((first, second), key=lambda r: r.rank)
        return None, "A tie: " + ", and ".join(f"rank {r.rank} {_did(r)}" for r in pair) + ", within a millisecond."
    return first.rank, f"Rank {first.rank} {_did(first)}; later rank {second.rank} {_did(second)}."


def _among_hurt(ranks: Sequence[Rank], hurt: Sequence[Rank], classes: Mapping[int, Class]) -> tuple[Culprit, str]:
    """Only consequences were recorded: whoever had left by then, with exit code 0, is missed."""
    victim = min(hurt, key=_failed_at)
    # A process closes its sockets a moment before it has ended, so the victim may be stamped first.
    by_then = _failed_at(victim) + LEAVING_TAKES_NS
    left = tuple(r.rank for r in ranks if classes[r.rank] == "passed" and (r.ended_ns or 0) <= by_then)
    verb = "lost its peer" if classes[victim.rank] == "peer_lost" else "gave up waiting"
    where = f" at {victim.failure.line_text}" if victim.failure and victim.failure.line_text else ""
    if left:
        who: Culprit = left[0] if len(left) == 1 else left
        return who, f"{_ranks_said(left)} left early with exit code 0; rank {victim.rank} {verb}{where}."
    return (
        None,
        f"Rank {victim.rank} {verb}{where}, and no rank failed by itself: the culprit cannot be told from this.",
    )


def _of_an_ended_job(ranks: Sequence[Rank], classes: Mapping[int, Class], ending: Ending) -> tuple[Culprit, str]:
    """ddpkit ended the job. A rank that had left while the others waited for it is at fault; otherwise nobody is named."""
    left = tuple(r.rank for r in ranks if classes[r.rank] == "passed")
    rest = [r for r in ranks if r.rank not in left]
    waiting = [(r, place) for r in rest if (place := _waiting_at(r))]
    why = _why_ended(ending)
    if left and waiting and len(waiting) == len(rest):
        who: Culprit = left[0] if len(left) == 1 else left
        rank, place = waiting[0]
        return who, f"{_ranks_said(left)} left early with exit code 0 while rank {rank.rank} waited at {place}. {why}"
    return None, why


def _why_ended(ending: Ending) -> str:
    if ending.reason == "timeout":
        return f"The job ran longer than timeout={ending.timeout_s:g} s and was ended."
    if ending.reason == "stall":
        return f"No rank made progress for stall={ending.stall_s:g} s and the job was ended."
    return "The job was stopped."


def _waiting_at(rank: Rank) -> str:
    """The user's line from which this rank waits inside torch.distributed, by its last stack; "" where it does not."""
    if not any(_WAITING.search(f.file) or _WAITING.search(f.function) for f in rank.stack_frames[:8]):
        return ""
    return rank.at.text if rank.at else "a collective"


def _failed_at(rank: Rank) -> int:
    return rank.failure.at_ns if rank.failure else rank.ended_ns or 0


def _likeness(rank: Rank) -> tuple[object, ...]:
    """Two ranks fail alike when the same exception comes from the same line; the rank's own number in the text aside."""
    if rank.failure is None:
        return ("exit", rank.exitcode)
    where = rank.failure.where
    return (rank.failure.type, (where.file, where.line) if where else None)


def _did(rank: Rank) -> str:
    """`raised ValueError: boom (line 7: raise ValueError("boom"))`."""
    failure = rank.failure
    if failure is None:
        return f"exited with code {rank.exitcode}" if (rank.exitcode or 0) > 0 else _killed(rank)
    place = f" ({failure.line_text})" if failure.line_text else ""
    if rank.signal and failure.type == rank.signal:
        return _killed(rank) + place
    if failure.type == "SystemExit":
        return f"left by sys.exit, {stable(failure.message).strip()}{place}"
    return f"raised {failure.text.rstrip('.')}{place}"


def _killed(rank: Rank) -> str:
    if rank.signal == "SIGKILL":
        return "was killed by SIGKILL, not sent by torchrun (by hand, or by the kernel for want of memory)"
    if rank.finished_ns:
        return f"was killed by {rank.signal} while Python shut down, after its script had come to its end"
    return f"was killed by {rank.signal}"


def _words(rank: Rank, kind: Class, ending: Ending, at_fault: bool) -> str:
    """A few words for the header of the rank's lane."""
    if kind == "passed":
        return "left early, exit code 0" if at_fault else "passed"
    if kind == "peer_lost":
        return "lost its peer: a consequence"
    if kind == "gave_up":
        return "gave up waiting: a consequence"
    if kind == "told":
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


def _ranks_said(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"Rank {numbers[0]}"
    return "Ranks " + ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
