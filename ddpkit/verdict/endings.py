"""How a rank ended: by its own fault, or by what a peer's end or silence did to it; and the words for that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddpkit.runfolder.failures import Failure
from ddpkit.runfolder.ranks import Rank
from ddpkit.runfolder.stable import stable

Class = Literal["passed", "own", "parted", "peer_lost", "gave_up", "heard", "told", "unknown"]

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

# torch.distributed.checkpoint raises on every rank what it met on some; with `reduce_fun`, what came of them all together.
_FAILED_IN_CHECKPOINT = re.compile(
    r"^CheckpointException ranks:dict_keys\(\[([\d, ]+)\]\)(?!.*reduce_fun\()", re.DOTALL
)

# What programs raise on a rank without a fault, as a flag that all have summed says that one has failed.
_TELLS_OF_ANOTHER = re.compile(
    r"\b(?:an)?other (?:rank|process|worker|replica|peer)(?:s|\(s\))? (?:ha[sd] |have )?(?:failed|crashed|raised|aborted|died)\b"
    r"|\b(?:failed|failure|error|exception) (?:on|in|of|from) (?:an)?other (?:rank|process|worker|replica|peer)"
    r"|\b(?:a|some) (?:rank|peer|replica) (?:has )?(?:failed|crashed|raised|aborted|died)\b"
    r"|\bpeer (?:rank )?(?:has )?failed\b"
    r"|\b\d+ (?:rank|process|worker|replica|peer)(?:s|es|\(s\))? (?:ha[sd] |have )?"
    r"(?:failed|crashed|raised|aborted|died|reported)\b",
    re.IGNORECASE,
)

# What another's end did to a rank, by its class.
MET = {"peer_lost": "lost its peer", "gave_up": "gave up waiting", "heard": "was told that a rank had failed"}

# No connection was lost: Join(throw_on_early_termination=True), and a checkpoint.
_TOLD_OF = [
    ("ended", re.compile(r"Detected at least one rank that exhausted inputs")),
    ("failed", _FAILED_IN_CHECKPOINT),
]

# Two ranks met in different collectives; which of them is wrong, neither text says.
_PARTED = re.compile(
    r"op\.preamble\.length <= op\.nbytes"
    r"|Detected mismatch between collectives on ranks"
    r"|Error when verifying shape tensors for collective"
    r"|appears not to match (sizes|strides) of the same param in process 0"
    r"|DDP expects same model across all ranks"
)

# By what a program leaves with an exit code of its own, as the record of it is called, and as it is written.
LEAVES = {
    "SystemExit": "sys.exit",
    "os._exit": "os._exit",
    "os.abort": "os.abort",
    "dump_traceback_later": "faulthandler.dump_traceback_later",
}

# What a program catches in the ordinary course of things, and goes on.
_ORDINARY = {"StopIteration", "KeyError", "Empty"}


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


def tells_of_another(rank: Rank) -> bool:
    """Whether this rank raised that another one had failed."""
    return rank.failure is not None and bool(_TELLS_OF_ANOTHER.search(rank.failure.message))


def own_before(rank: Rank) -> str:
    """What this rank had raised by itself before it met its last exception, in a `finally` say; "" where nothing."""
    chain = rank.failure.chain if rank.failure else ()
    suffered = (_PARTED, _PEER_LOST, _GAVE_UP)
    told = ((kind, f"{kind}: {text}") for kind, text in reversed(chain) if kind not in _ORDINARY)
    own = (text for _kind, text in told if not any(pattern.search(text) for pattern in suffered))
    return stable(next(own, "")).strip()


def sent_by(rank: Rank, name: str, ranks: Sequence[Rank]) -> tuple[int, str] | None:
    """The rank that sent this one the signal `name`, and ` (line 7: os.kill(pid, 9))`; None where no other is known to have."""
    for other in ranks:
        if other is not rank and (rank.pid, name) in other.signals_sent:
            where = other.signals_sent[rank.pid, name]
            return other.rank, f" ({where.text})" if where else ""
    return None


def failed_at(rank: Rank) -> int:
    return rank.failure.at_ns if rank.failure else rank.ended_ns or 0


def deed(rank: Rank) -> str:
    """`raised ValueError: boom (line 7: raise ValueError("boom"))`."""
    failure = rank.failure
    if failure is None:
        return f"exited with code {rank.exitcode}" if (rank.exitcode or 0) > 0 else _killed(rank)
    place = f" ({failure.line_text})" if failure.line_text else ""
    if rank.signal and failure.type == rank.signal:
        return _killed(rank) + place
    if leaves := LEAVES.get(failure.type):
        handled = f", while it handled {': '.join(filter(None, failure.chain[0])).rstrip('.')}" if failure.chain else ""
        return f"left by {leaves}, {stable(failure.message).strip()}{place}{stable(handled)}"
    return f"raised {failure.text.rstrip('.')}{place}"


def common_deed(ranks: Sequence[Rank]) -> str:
    """What these ranks did, in the words of the lowest; said to be its own where the others' words differ."""
    first, failure = ranks[0], ranks[0].failure
    if failure is None or len({r.failure.text for r in ranks if r.failure}) == 1:
        return deed(first)
    if failure.type in LEAVES:
        return f"left, rank {first.rank} so: {deed(first)}"
    return f"raised {failure.type}, rank {first.rank} this: {deed(first).removeprefix('raised ')}"


def _killed(rank: Rank) -> str:
    if rank.oom:
        return f"was killed by the kernel for want of memory ({stable(rank.oom)})"
    if rank.signal == "SIGKILL":
        return "was killed by SIGKILL, not sent by torchrun (by hand, or by the kernel for want of memory)"
    if rank.finished_ns:
        return f"was killed by {rank.signal} while Python shut down, after its script had come to its end"
    return f"was killed by {rank.signal}"


def words_for(rank: Rank, end: Class, ending: Ending, kind: str, at_fault: bool) -> str:
    """A few words for the header of the rank's lane; `kind` is the verdict's."""
    if end == "passed":
        return "left early, exit code 0" if at_fault else "passed"
    if end in ("peer_lost", "gave_up", "heard"):
        met = "met another rank's nan" if end == "heard" and kind == "not_finite" else MET[end]
        for what, pattern in _TOLD_OF:
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
    by = by or ("ended after torchrun's death" if ending.agent_signal else "ended by torchrun")
    failure = rank.failure
    if failure and failure.type not in (rank.signal, *LEAVES) and classify_failure(failure, rank) == "own":
        return f"{by}, and raised {failure.type} then"
    return by


def plain_words(rank: Rank) -> str:
    """What happened to the rank, without saying whose fault it was."""
    if rank.failure and (leaves := LEAVES.get(rank.failure.type)):
        return f"left by {leaves}, exit code {rank.exitcode}"
    if rank.failure and rank.failure.type != rank.signal:
        return f"raised {rank.failure.type}"
    if rank.signal:
        return f"ended by {rank.signal}" if rank.told else f"killed by {rank.signal}"
    if rank.exitcode is None:
        return "how it ended is not recorded"
    return "passed" if rank.exitcode == 0 else f"exited with code {rank.exitcode}"
