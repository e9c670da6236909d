"""Says who holds up a job in which nothing moves, from what was found when ddpkit looked: collectives, stacks, states.

The rank that a wait ends at is at fault: a rank that waits for a peer is held up, and so is one that waits for a rank
which itself waits. Where the ranks wait for each other in different collectives, the one that left the common way is.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from . import wire
from .collectives import Collective, Parting, drift, mismatch
from .frames import Frame, stack_frames
from .records import Rank

Kind = Literal["left", "late", "stopped", "waiting", "joining", "loading", "busy", "idle", "unknown"]

# With more ranks than cores each gets a part of one; a rank that sleeps or polls uses next to nothing.
BUSY_FROM = 0.15
_REFERENCE = re.compile(r"appears not to match (sizes|strides) of the same param in process 0")
# Where a program meets a collective that it began earlier; on a GPU that is at any look at a value.
_AWAITING = re.compile(r"\.(wait|synchronize|item|tolist|cpu|numpy)\(")
_WATCHDOG = re.compile(
    r"(?:PG (?:ID|GUID) (?P<group>\d+).*?)?Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)"
)
_NAMED = re.compile(r"\bRanks? (\d[\d, ]*) failed to pass monitoredBarrier")
_JOINING = re.compile(r"\b(init_process_group|rendezvous|_store_based_barrier|_create_c10d_store)\b")
_LOADING = re.compile(r"torch.utils.data.dataloader\.py")
_WAITING = re.compile(r"torch.distributed.(distributed_c10d|nn|_functional_collectives)")
_WORKERS_OWN = "_worker_loop"
_BACKWARD = "_engine_run_backward"


@dataclass(frozen=True)
class Standing:
    """Where one rank stands: in which way, at which of the user's own lines, and in which collective if it waits in one."""

    rank: Rank
    kind: Kind
    place: Frame | None = None
    collective: Collective | None = None

    @property
    def words(self) -> str:
        """`waits in all_reduce #9`, `idle at line 40: time.sleep(60)`."""
        at = f" at {self.place.text}" if self.place else ""
        if self.kind == "waiting":
            return f"waits in {self.collective.name}" if self.collective else f"waits{at}"
        said: dict[Kind, str] = {
            "left": "has left",
            "late": "came only after that",
            "stopped": f"is stopped (SIGSTOP){at}",
            "joining": "waits for the others to join",
            "loading": f"waits for its DataLoader worker{at}",
            "busy": f"computes{at}",
            "idle": f"sits{at}",
        }
        return said.get(self.kind, "is somewhere unknown")


@dataclass(frozen=True)
class Finding:
    """Who holds the job up: ranks, empty where the evidence does not say. `kind` is one of the verdict's kinds."""

    ranks: tuple[int, ...]
    sentence: str
    kind: str


def standings(ranks: Sequence[Rank], at_ns: int | None = None) -> dict[int, Standing]:
    """Where each rank stands, by rank; or where it stood at `at_ns`, when the first wait was given up."""
    return {rank.rank: standing(rank, at_ns) for rank in ranks}


def standing(rank: Rank, at_ns: int | None = None) -> Standing:
    """Where this rank stands; for one that has ended, where it stood when it failed."""
    waiting = next((c for c in rank.collectives if not c.done), None)
    if at_ns and any(c.at_ns > at_ns for c in rank.collectives):
        return Standing(rank, "late")
    if rank.exitcode == 0:
        return Standing(rank, "left", collective=waiting)
    if rank.failure is not None:
        return Standing(rank, "waiting" if _joined(rank) else "joining", rank.failure.where, waiting or _given_up(rank))
    if rank.look is None:
        return Standing(rank, "unknown")
    frames, place = rank.stack_frames, rank.at
    if rank.look.state == "stopped":
        return Standing(rank, "stopped", place, waiting)
    # The stack says what the rank itself does; a collective that runs beside it holds nobody up.
    if rank.joining and not _joined(rank) and (not frames or any(_JOINING.search(f.function) for f in frames)):
        return Standing(rank, "joining", place or rank.joining.where)
    inner = list(itertools.takewhile(lambda frame: not frame.own, frames))
    if any(_LOADING.search(f.file) for f in inner):
        return Standing(rank, "loading", place, waiting)
    if any(_WAITING.search(f.file) for f in inner) or _waits_unseen(rank, inner, place, waiting):
        return Standing(rank, "waiting", place, waiting)
    if not frames:
        return Standing(rank, "unknown")
    # A GPU that computes while no collective is open computes for this rank; an open one keeps it busy by waiting.
    on_gpu = 0.0 if waiting else rank.look.gpu_busy or 0.0
    return Standing(rank, "busy" if max(rank.look.busy, on_gpu) >= BUSY_FROM else "idle", place, waiting)


def _waits_unseen(rank: Rank, inner: Sequence[Frame], place: Frame | None, waiting: Collective | None) -> bool:
    """Whether a rank waits whose innermost call is none of torch.distributed's: in backward, at a look at a value.

    Backward may also compute. Where the collectives are known, one must be open; where they are not, the rank must be idle.
    """
    in_backward = any(f.function == _BACKWARD for f in inner)
    if waiting is None:
        return in_backward and not rank.collectives and rank.look is not None and rank.look.busy < BUSY_FROM
    if place is None:
        return True
    return in_backward or _same_line(waiting.where, place) or bool(_AWAITING.search(place.source))


def _same_line(one: Frame | None, other: Frame | None) -> bool:
    return one is not None and other is not None and (one.file, one.line) == (other.file, other.line)


def _given_up(rank: Rank) -> Collective | None:
    """The collective that this rank waited in when it failed. One that was given up counts as done; of one that NCCL's
    watchdog gave up, only the process's last words tell."""
    failed = rank.failure.where if rank.failure else None
    last = rank.collectives[-1] if rank.collectives else None
    if last and _same_line(last.where, failed):
        return last
    said = _WATCHDOG.search(rank.stderr[-20_000:])
    if said is None:
        return None
    op, group = said["op"].lower(), said["group"] or "0"
    return Collective(int(said["seq"]), op, group, "default_pg" if group == "0" else "", (), (), (), 0, False, failed)


def _joined(rank: Rank) -> bool:
    """Whether this rank's process group came up: only then it can have answered for its collectives."""
    return bool(rank.collectives) or rank.joining is None or (rank.folder / wire.ASK).exists()


def find(ranks: Sequence[Rank], live: bool = False, at_ns: int | None = None) -> Finding | None:
    """Who holds the job up, or held it up when a wait was given up at `at_ns`; None where nobody was looked at.

    With `live` the job may still go on by itself.
    """
    at = standings(ranks, at_ns)
    if not any(rank.look or rank.failure for rank in ranks):
        return None
    stopped = [s for s in at.values() if s.kind == "stopped"]
    if stopped:
        return _blamed(stopped, at, "stopped_process")
    if named := _named_by_a_barrier(ranks):
        first = at[named[0]]
        does = "" if first.kind == "unknown" else f"; {_does(first, named)}"
        return Finding(named, f"{ranks_said(named)} never came to a monitored barrier{does}.", "never_joined")
    joining = [s for s in at.values() if s.kind == "joining"]
    if joining:
        return _while_joining(joining, at, live)
    histories = {rank.rank: rank.collectives for rank in ranks if rank.collectives}
    waiting = {n: s for n, s in at.items() if s.kind == "waiting"}
    parted = mismatch(histories) if len(histories) > 1 else None
    if parted and waiting:
        return _parted(parted, "mismatch")
    strayed = drift(histories) if len(histories) > 1 else None
    if strayed and waiting:
        return _parted(strayed, "mismatch")
    if waiting:
        return _among_waiting(waiting, at, live, at_ns)
    return _nobody_waits(at)


def _named_by_a_barrier(ranks: Sequence[Rank]) -> tuple[int, ...]:
    """The ranks that `monitored_barrier` itself says were missing."""
    said = (_NAMED.search(rank.failure.message) for rank in ranks if rank.failure)
    numbers = {int(n) for found in said if found for n in found[1].replace(",", " ").split()}
    return tuple(sorted(numbers & {rank.rank for rank in ranks}))


def _does(first: Standing, ranks: Sequence[int]) -> str:
    """What the ranks at fault do instead; the first speaks for all."""
    if first.kind == "left":
        return f"{'it' if len(ranks) == 1 else 'they'} left early with exit code 0"
    return f"{'it' if len(ranks) == 1 else f'rank {first.rank.rank}'} {first.words}"


def _among_waiting(
    waiting: Mapping[int, Standing], at: Mapping[int, Standing], live: bool, at_ns: int | None
) -> Finding:
    """Some ranks wait in collectives: whoever has not joined them, and does not wait itself, holds them up."""
    blamed: dict[int, Standing] = {}
    for waiter in waiting.values():
        for number in _missing_in(waiter, at, at_ns):
            missing = at[number]
            known = missing.kind != "unknown" or missing.rank.collectives
            if missing.kind != "waiting" and known:
                blamed[number] = missing
    if not blamed:
        said = "; ".join(f"rank {n} {s.words}{_from(s)}" for n, s in sorted(waiting.items()))
        return Finding(
            (), f"All ranks wait for each other: {said}. Who is at fault cannot be told from this.", "all_waiting"
        )
    ranks = sorted(blamed)
    if len(ranks) > len(waiting) and all(s.kind == "left" for s in blamed.values()):
        return _waits_alone(waiting, ranks)
    waiter = min(waiting.values(), key=lambda s: s.rank.rank)
    what = _whom_it_waits_for(waiter)
    joined = "has not joined" if live else "never joined"
    first = blamed[ranks[0]]
    does = _does(first, ranks)
    kinds = {"left": "left_early", "loading": "loader_stuck", "late": "straggler"}
    kind = kinds.get(first.kind, "never_joined")
    if first.kind == "late":
        joined, does = "came too late to", "the others had given up by then"
    sentence = f"{ranks_said(ranks)} {joined} {what}; {does}. {_who_waits_there(waiting)}{_worker(first)}"
    return Finding(tuple(ranks), sentence, kind)


def _waits_alone(waiting: Mapping[int, Standing], left: Sequence[int]) -> Finding:
    """Most ranks came to their end without the collective in which a few still wait: the few have one too many."""
    numbers = tuple(sorted(waiting))
    what = _whom_it_waits_for(waiting[numbers[0]])
    verb = _verb(numbers, "waits", "wait")
    sentence = f"{ranks_said(numbers)} {verb} in {what}, which no other rank joined: the others left with exit code 0."
    return Finding(numbers, sentence, "never_joined")


def _whom_it_waits_for(waiter: Standing) -> str:
    if waiter.collective:
        return f"{waiter.collective.name}{waiter.collective.from_line}"
    return f"what rank {waiter.rank.rank} waits for{_from(waiter)}"


def _missing_in(waiter: Standing, at: Mapping[int, Standing], at_ns: int | None) -> list[int]:
    """The ranks that have not joined the collective `waiter` waits in."""
    wanted = waiter.collective
    if wanted is None:
        return [n for n, s in at.items() if s.kind != "waiting"]
    members = wanted.ranks or tuple(at)
    return [n for n in members if n in at and n != waiter.rank.rank and _last_joined(at[n], wanted, at_ns) < wanted.seq]


def _last_joined(standing: Standing, wanted: Collective, at_ns: int | None) -> int:
    joined = [c for c in standing.rank.collectives if c.group == wanted.group and not (at_ns and c.at_ns > at_ns)]
    return max((c.seq for c in joined), default=0)


def _while_joining(joining: Sequence[Standing], at: Mapping[int, Standing], live: bool) -> Finding:
    """Ranks wait in `init_process_group`: for one that asks elsewhere, for one that never came, or for one too many."""
    asked = {s.rank.rank: s.rank.joining for s in joining if s.rank.joining}
    masters = {n: s.rank.master for n, s in at.items() if s.rank.master}
    astray = [n for n, j in asked.items() if j and j.master and n in masters and j.master != masters[n]]
    if astray and len(astray) < len(at):
        where = asked[astray[0]]
        place = where.master if where else ""
        vain = "which is not where torchrun has it; the others wait in vain"
        sentence = f"{ranks_said(astray)} asked for the store at {place}, {vain}."
        return Finding(tuple(astray), sentence, "init_elsewhere")
    world_size = max(s.rank.world_size for s in at.values())
    sizes = {n: j.world_size for n, j in asked.items() if j and j.world_size != world_size}
    if sizes:
        size = next(iter(sizes.values()))
        alike = len(sizes) == len(at)
        who = "Every rank" if alike else ranks_said(sorted(sizes))
        sentence = f"{who} asked for a world size of {size}, but torchrun started {world_size} ranks."
        return Finding(tuple(sorted(sizes)), sentence, "init_waiting")
    absent = [n for n, s in at.items() if s.kind != "joining"]
    if absent:
        first = at[absent[0]]
        does = _does(first, absent)
        came = "has not come" if live else "never came"
        others = f"{ranks_said([s.rank.rank for s in joining])} {_verb(joining, 'waits', 'wait')}"
        opening = f"{ranks_said(absent)} {came} to init_process_group; {does}."
        sentence = f"{opening} {others} there{_from(joining[0])}."
        return Finding(tuple(absent), sentence, "init_waiting")
    return Finding((), "Every rank waits in init_process_group, and none can be told to be at fault.", "init_waiting")


def find_parting(ranks: Sequence[Rank]) -> Finding:
    """Who met others in another collective, where gloo or torch has said that somebody did.

    A rank that gloo aborts leaves no record of its collectives, only its stack: then the lines must tell.
    """
    histories = {rank.rank: rank.collectives for rank in ranks if rank.collectives}
    parted = mismatch(histories) if len(histories) > 1 else None
    if parted:
        return _parted(parted, "mismatch")
    differing = tuple(r.rank for r in ranks if r.failure and _REFERENCE.search(r.failure.message))
    if differing:
        return _against_rank_0(differing, ranks)
    lines = {r.rank: where for r in ranks if (where := _failed_line(r))}
    camps: dict[str, list[int]] = {}
    for rank, where in lines.items():
        camps.setdefault(where.text, []).append(rank)
    by_size = sorted(camps.values(), key=len)
    said = "; ".join(f"rank {n} was at {where.text}" for n, where in sorted(lines.items()))
    opening = f"The ranks met in different collectives: {said}."
    if len(by_size) > 1 and len(lines) == len(ranks) and len(by_size[-1]) > len(by_size[-2]):
        return Finding(tuple(sorted(n for camp in by_size[:-1] for n in camp)), opening, "mismatch")
    return Finding((), f"{opening} Which of them is wrong cannot be told from this.", "mismatch")


def _against_rank_0(differing: tuple[int, ...], ranks: Sequence[Rank]) -> Finding:
    """DDP holds every rank's parameters against those of rank 0: where all others differ from it, it is the odd one."""
    said = f"{ranks_said(differing)} {_verb(differing, 'has', 'have')} parameters of another shape than rank 0"
    if len(ranks) < 3:
        return Finding((), f"{said}. Which of them is wrong cannot be told from this.", "shapes_differ")
    odd = (0,) if len(differing) == len(ranks) - 1 else differing
    return Finding(
        odd, f"{said}, and {'all others agree' if odd == (0,) else 'the others agree with it'}.", "shapes_differ"
    )


def _failed_line(rank: Rank) -> Frame | None:
    if rank.failure and rank.failure.where and rank.failure.where.own:
        return rank.failure.where
    return rank.at


def _parted(parting: Parting, kind: str) -> Finding:
    """The ranks joined different collectives as the same one."""
    joined = parting.joined
    first = min(joined.values(), key=lambda c: c.seq)
    same_words = len({c.shape_words for c in joined.values()}) == 1
    said = "; ".join(
        f"rank {n} {'came to it from' if same_words else f'joined {c.shape_words}'}{_line_of(c, bare=same_words)}"
        for n, c in sorted(joined.items())
    )
    number = f"collective #{first.seq}"
    if parting.odd:
        opening = f"{ranks_said(parting.odd)} left the common way at {number}"
        return Finding(parting.odd, f"{opening}: {said}; {parting.why}.", kind)
    return Finding((), f"The ranks part at {number}: {said}. Which of them is wrong cannot be told from this.", kind)


def _line_of(collective: Collective, bare: bool) -> str:
    if collective.where is None:
        return " a line that is not known" if bare else ""
    return f" {collective.where.text}" if bare else collective.from_line


def _nobody_waits(at: Mapping[int, Standing]) -> Finding:
    """No rank waits for another: a loader, a sleep, an endless loop, or honest work."""
    alive = {n: s for n, s in at.items() if s.kind in ("loading", "busy", "idle")}
    if not alive:
        return Finding((), "No rank answers, and what they do cannot be told.", "unknown")
    loading = [s for s in alive.values() if s.kind == "loading"]
    kind = "loader_stuck" if loading else "busy" if any(s.kind == "busy" for s in alive.values()) else "silent"
    if len({s.words for s in alive.values()}) == 1 and len(alive) == len(at):
        first = alive[min(alive)]
        who = "Every rank" if len(alive) > 1 else f"Rank {first.rank.rank}"
        return Finding(tuple(sorted(alive)), f"{who} {first.words}.{_worker(first)}", kind)
    if loading and len(loading) < len(at):
        return _blamed(loading, at, kind)
    said = "; ".join(f"rank {n} {s.words}" for n, s in sorted(alive.items()))
    return Finding((), f"No rank waits for another: {said}.", kind)


def _blamed(blamed: Sequence[Standing], at: Mapping[int, Standing], kind: str) -> Finding:
    by_rank = {s.rank.rank: s for s in blamed}
    waiting = {n: s for n, s in at.items() if s.kind == "waiting"}
    others = f" {_each(waiting)}" if waiting else ""
    return Finding(tuple(by_rank), f"{_each(by_rank)}{others}{_worker(blamed[0])}", kind)


def _worker(standing: Standing) -> str:
    """What the loader's worker does that this rank waits for."""
    look = standing.rank.look
    for _pid, stack in look.workers if look and standing.kind == "loading" else ():
        # Further out stand the rank's own frames, from before the worker was forked.
        frames = itertools.takewhile(lambda frame: not frame.function.endswith(_WORKERS_OWN), stack_frames(stack, {}))
        if place := next((frame for frame in frames if frame.own), None):
            return f" The worker is in {place.function}, {place.text}."
    return ""


def _who_waits_there(waiting: Mapping[int, Standing]) -> str:
    """`Rank 0 waits there.`, or who waits where, if not all wait in the same collective."""
    if len({s.collective.name if s.collective else "" for s in waiting.values()}) > 1:
        return _each(waiting)
    who = ranks_said(sorted(waiting))
    if any(s.rank.failure for s in waiting.values()):
        return f"{who} waited there in vain."
    return f"{who} {_verb(waiting, 'waits', 'wait')} there."


def _each(standing: Mapping[int, Standing]) -> str:
    """`Rank 0 waits in all_reduce #9; rank 2 waits at line 12: dist.recv(x).`"""
    said = "; ".join(f"rank {n} {s.words}" for n, s in sorted(standing.items()))
    return f"{said[:1].upper()}{said[1:]}."


def _from(standing: Standing) -> str:
    return f" at {standing.place.text}" if standing.place else ""


def _verb(who: Sequence[object] | Mapping[int, object], one: str, more: str) -> str:
    return one if len(who) == 1 else more


def ranks_said(numbers: Sequence[int]) -> str:
    """`Rank 1`, or `Ranks 0, 1 and 3`."""
    if len(numbers) == 1:
        return f"Rank {numbers[0]}"
    return "Ranks " + ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
