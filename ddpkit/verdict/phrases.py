"""What a rank did or does, in words: phrases for the sentences in `words.py` and for a rank's lane."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ddpkit.runfolder.failures import LEAVES
from ddpkit.runfolder.frames import Frame
from ddpkit.runfolder.ranks import Rank
from ddpkit.runfolder.stable import stable

from .places import Place, peers, place_on_the_way_out

_WORKERS_OWN = "_worker_loop"


def ranks_said(numbers: Sequence[int]) -> str:
    """`rank 1`, or `ranks 0, 1 and 3`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return "ranks " + ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"


def at(line: Frame | None) -> str:
    """` at line 7: x.sum()`; "" where no line is known."""
    return f" at {line.text}" if line else ""


def in_brackets(line: Frame | None) -> str:
    """` (line 7: x.sum())`; "" where no line is known."""
    return f" ({line.text})" if line else ""


def did(rank: Rank) -> str:
    """How a rank ended: `raised ValueError: boom (line 7: raise ValueError("boom"))`."""
    failure = rank.failure
    if failure is None:
        return f"exited with code {rank.exitcode}" if (rank.exitcode or 0) > 0 else _killed(rank)
    if rank.signal and failure.type == rank.signal:
        return _killed(rank) + in_brackets(failure.where)
    if failure.type in LEAVES:
        handled = ": ".join(filter(None, failure.chain[0])).rstrip(".") if failure.chain else ""
        beside = f", while it handled {stable(handled)}" if handled else ""
        return f"left by {LEAVES[failure.type]}, {stable(failure.message).strip()}{in_brackets(failure.where)}{beside}"
    left = f", caught it, and left by {stable(failure.left_by)}" if failure.left_by else ""
    return f"raised {failure.text.rstrip('.')}{in_brackets(failure.where)}{left}{failure.details}"


def then_did(rank: Rank) -> str:
    """What kept a failed rank from ending: ` It did not end then: it waits in barrier #4, in its exit functions.`, or ""."""
    place = place_on_the_way_out(rank)
    if place is None or place.kind == "unknown":
        return ""
    left = next((frame.source for frame in place.rank.stack_frames if frame.function == "leave" and not frame.own), "")
    if "threading" in left:
        return " It did not end then: it waits for its own threads to end."
    return f" It did not end then: it {doing(place)}{', in its exit functions' * ('atexit' in left)}."


def did_alike(ranks: Sequence[Rank]) -> str:
    """How several ranks ended, in the words of the lowest one; it is named if the others' messages differ."""
    first = min(ranks, key=lambda rank: rank.rank)
    failure = first.failure
    if failure is None or len({rank.failure.text for rank in ranks if rank.failure}) == 1:
        return did(first)
    alike = "left" if failure.type in LEAVES else f"raised {failure.type}"
    return f"{alike}; rank {first.rank} {did(first)}"


def _killed(rank: Rank) -> str:
    if rank.oom:
        return f"was killed by the kernel because memory ran out ({stable(rank.oom)})"
    if rank.signal == "SIGKILL":
        return "was killed by SIGKILL, not sent by torchrun (sent by hand, or by the kernel because memory ran out)"
    if rank.finished_ns:
        return f"was killed by {rank.signal} while Python shut down, after its script had ended"
    return f"was killed by {rank.signal}"


def doing(place: Place) -> str:
    """What a rank does now: `waits in all_reduce #9 (line 12: ...)`, `sits at line 40: time.sleep(60)`."""
    if place.kind == "waiting" and place.collective:
        return f"waits in {place.collective.name}{in_brackets(place.line or place.collective.where)}"
    if place.kind == "waiting":
        return f"waits{_for_what(place)}{at(place.line)}"
    return {
        "left": f"left early with exit code 0{at(place.line)}",
        "late": "came only after that",
        "stopped": f"is stopped (SIGSTOP){at(place.line)}",
        "joining": f"waits for the others to join{at(place.line)}",
        "loading": f"waits for its DataLoader worker{at(place.line)}",
        "busy": f"computes{at(place.line)}",
        "idle": f"{'waits for the disk' if place.at_disk else 'sits'}{at(place.line)}",
    }.get(place.kind, "is somewhere unknown")


def _for_what(place: Place) -> str:
    """` for the key "size/3" of the store`, ` for rank 0`; "" where that is not known."""
    keys = place.rank.awaited
    if keys:
        return f" for the key{'s' if len(keys) > 1 else ''} " + ", ".join(f'"{key}"' for key in keys) + " of the store"
    met = sorted(peers(place)) if place.pairwise else []
    return f" for {ranks_said(met)}" if met else ""


def helper(place: Place) -> str:
    """What the DataLoader worker does that a rank waits for, or which exception ended a thread that it may wait for."""
    look, died_of = place.rank.look, place.rank.thread_died_of
    if place.kind == "idle" and died_of:
        return f" One of its threads died with {died_of}."
    if look is None or place.kind not in ("loading", "idle"):
        return ""
    if look.dead_workers and place.kind == "loading":
        return " One of its workers has died."
    for stack in place.rank.helpers:
        # The outer frames are the rank's own, from before the worker was forked.
        frames = itertools.takewhile(lambda frame: not frame.function.endswith(_WORKERS_OWN), stack)
        line = next((frame for frame in frames if frame.own), None)
        if line:
            stopped = "stopped (SIGSTOP) " if look.stopped_workers else ""
            worker = "Its worker" if place.kind == "loading" else "A process that it started"
            return f" {worker} is {stopped}in {line.function}, {line.text}."
    return ""
