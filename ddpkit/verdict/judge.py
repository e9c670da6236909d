"""The verdict on a job: how each rank ended, which rank waits for which, which rank differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddpkit.runfolder.account import Ending, as_they_stood
from ddpkit.runfolder.frames import is_joining
from ddpkit.runfolder.ranks import Rank

from .ends import End, ends, failed_at, sent_by
from .finding import Culprit, Finding, Verdict, numbers_of
from .odd_one_out import by_groups, by_majority, odd_one
from .own_failure import by_own_failure
from .places import STILL_FROM_S, Place, peers, place_of, unmoved_s
from .startup import asked_amiss, while_joining
from .torch_says import models_differ, named_by_a_barrier
from .waits import Scene, first_given_up, scene, sinks
from .words import sentence

# A process closes its sockets shortly before it ends.
_ENDING_TAKES_NS = 3_000_000_000
# A rank that has waited for less time than this many of its steps is in the middle of a normal step.
_STEPS_MISSED = 2
_ROLES: dict[End, str] = {"passed": "passed", "own": "own", "parted": "unknown", "unknown": "unknown"}
# These compare ranks with each other: question 3.
_COMPARES = ("numbers", "models differ", "groups", "majority", "loop", "step", "next call", "habit", "debt", "if")


def judge_job(attempts: Sequence[Sequence[Rank]], ending: Ending) -> Verdict:
    """The verdict on the last attempt of a job; after a restart the sentence also says what ended attempt 1."""
    verdict = judge(attempts[-1] if attempts else (), ending)
    if len(attempts) < 2 or not verdict.sentence:
        return verdict
    # A failure after a restart may come from torch itself; the reader can fix what caused the restart.
    began = judge(attempts[0], Ending(agent_exitcode=1)).sentence
    said = verdict.sentence if began == verdict.sentence else f"{verdict.sentence} Before, in attempt 1: {began}"
    return replace(verdict, sentence=said)


def judge(ranks: Sequence[Rank], ending: Ending) -> Verdict:
    """The verdict on one attempt of a job."""
    ended = ends(ranks)
    found = find(ranks, ended, ending)
    who = found.ranks
    culprit: Culprit = None
    if len(who) == 1:
        culprit = who[0]
    elif who:
        culprit = "every rank" if len(who) == len(ranks) else tuple(sorted(who))
    roles, waits = {}, {}
    for number, end in ended.items():
        roles[number] = "culprit" if number in who else _ROLES.get(end, "consequence")
        if found.now and not who:
            waits[number] = tuple(sorted(found.now.waits[number]))
    said = sentence(found, ranks, ending)
    certain = found.rule not in (*_COMPARES, "cannot be told")
    return Verdict(culprit, said, found.kind, found.rule, certain, ended, roles, waits)


def find(ranks: Sequence[Rank], ended: Mapping[int, End], ending: Ending) -> Finding:
    """Ask the three questions of docs/verdict.md in order."""
    own, hurt, lost = [], [], []
    for rank in ranks:
        if rank.node in ending.lost_nodes:
            lost.append(rank)
        elif ended[rank.rank] == "own":
            own.append(rank)
        elif ended[rank.rank] in ("peer_lost", "gave_up", "reported"):
            hurt.append(rank)
    if own:
        return by_own_failure(own, ranks)
    if lost:
        return Finding(numbers_of(lost), "agent", "node_lost", others=numbers_of(hurt))
    if "parted" in ended.values():
        return _parted(ranks)
    if ending.reason:
        return _of_an_ended_job(ranks, ending)
    if ending.agent_signal:
        return Finding((), "agent", "agent_killed")
    if hurt:
        return _among_hurt(ranks, hurt, ended)
    if set(ended.values()) == {"passed"}:
        return Finding((), "agent", "agent_failed") if ending.agent_exitcode else Finding((), "passed", "passed")
    return Finding((), "unknown", "unknown" if ranks else "agent_failed")


def _parted(ranks: Sequence[Rank]) -> Finding:
    """The ranks that joined another collective or built another model, where torch or gloo reports a mismatch."""
    now = scene(ranks)
    found = None if now.split else models_differ(ranks)
    if found:
        return found
    found = odd_one(now, everyone=True)
    return replace(found, ranks=found.ranks if len(found.ranks) < len(ranks) else (), kind="mismatch")


def _among_hurt(ranks: Sequence[Rank], hurt: Sequence[Rank], ended: Mapping[int, End]) -> Finding:
    """The culprit if no rank failed by itself: a rank that left, or by the first wait given up."""
    victim = min(hurt, key=failed_at)
    if victim.failure and victim.failure.at_fault:
        return Finding(victim.failure.at_fault, "named by a rank", "told_by_others", others=(victim.rank,))
    if all(ended[rank.rank] == "reported" for rank in hurt):
        quiet = numbers_of(rank for rank in ranks if rank not in hurt)
        kind = "told_by_others" if len(quiet) == 1 else "unknown"
        return Finding(quiet if len(quiet) == 1 else (), "reported", kind, others=(victim.rank,))
    now = scene(ranks)
    if found := by_groups(now, set(now.at)):
        return found
    moment = first_given_up(ranks, ended)
    left = () if moment else _had_left(victim, ranks, ended)
    found = Finding(left, "left", "left_early", others=(victim.rank,)) if left else _by_questions_2_and_3(ranks, moment)
    left = numbers_of(rank for rank in ranks if ended[rank.rank] == "passed")
    if not found.ranks and left:
        return Finding(left, "left", "left_early", others=(victim.rank,))
    known = found.ranks or found.kind in ("mismatch", "all_waiting", "stale_addresses")
    return found if known else replace(found, kind=ended[victim.rank])


def _had_left(victim: Rank, ranks: Sequence[Rank], ended: Mapping[int, End]) -> tuple[int, ...]:
    """The ranks that had exited with 0 when the victim lost a peer: a closed connection points to a rank that ended.

    Example: rank 1 leaves by os._exit(0), and rank 0 gets "Connection closed by peer": rank 1.
    """
    by_then = failed_at(victim) + _ENDING_TAKES_NS
    place = place_of(victim)
    asked = peers(place) if place.pairwise else ()
    left = []
    for rank in ranks:
        if ended[rank.rank] == "passed" and (rank.ended_ns or 0) <= by_then and (not asked or rank.rank in asked):
            left.append(rank.rank)
    return tuple(left)


def _of_an_ended_job(ranks: Sequence[Rank], ending: Ending) -> Finding:
    """The ranks that held up a job that ddpkit ended, if nothing moved by then; otherwise nobody."""
    before = as_they_stood(ranks)
    found = who_holds_up_the_job(before)
    if ending.reason == "stall" or (found.kind != "busy" and _stood_still(before)):
        return found
    return Finding((), "ended", "timed_out" if ending.reason == "timeout" else "ended")


def _stood_still(ranks: Sequence[Rank]) -> bool:
    """Whether nothing had moved for longer than two of the job's steps."""
    longest_ns, still, waiting = 0, [], []
    for rank in ranks:
        for call, next_call in zip(rank.collectives, rank.collectives[1:], strict=False):
            longest_ns = max(longest_ns, next_call.at_ns - call.at_ns)
        if rank.look:
            still.append(unmoved_s(rank))
            if place_of(rank).kind in ("waiting", "joining"):
                waiting.append(unmoved_s(rank))
    return min(waiting or still, default=0.0) >= max(STILL_FROM_S, _STEPS_MISSED * longest_ns / 1e9)


def who_holds_up_the_job(ranks: Sequence[Rank]) -> Finding:
    """The ranks that hold up a job in which nothing moves, also if a rank gave up a wait earlier and caught the error.

    A rank that has raised has failed by that, even if its exit functions now wait for others.
    """
    ended = ends(ranks)
    own = [rank for rank in ranks if rank.failure and ended[rank.rank] == "own"]
    if own:
        return by_own_failure(own, ranks)
    moment = first_given_up(ranks, ended)
    found = _by_questions_2_and_3(ranks, moment)
    return found if found.ranks or moment is None else _by_questions_2_and_3(ranks)


def _by_questions_2_and_3(ranks: Sequence[Rank], at_ns: int | None = None) -> Finding:
    """The ranks that hold the job up, by questions 2 and 3: as it was found, or when the first wait was given up."""
    if not ranks:
        return Finding((), "unknown", "unknown")
    now = scene(ranks, at_ns)
    found = _stopped(now, ranks) or named_by_a_barrier(ranks)
    if not found and now.of_kind("joining"):
        found = while_joining(now)
    found = found or asked_amiss(now) or _holds_a_lock(now)
    if not found and not now.waiting:
        found = _nobody_waits(now)
    # Gloo can let mismatched collectives pass, and the odd rank goes on: so look for a split first.
    found = found or by_groups(now, set(now.at)) or by_majority(now, set(now.at))
    if found:
        return found
    free = sinks(now)
    return _end_of_the_waits(now, free) if free else odd_one(now)


def _end_of_the_waits(now: Scene, free: Sequence[int]) -> Finding:
    """The ranks that others wait for and that wait for nobody; what they do instead gives the failure its name.

    If most ranks are idle at one line, they probably wait for something outside torch.distributed: nobody is named.
    """
    first = now.at[free[0]]
    waiters = [number for number in now.at if now.waits[number] & set(free) and number not in free]
    # The rank that waits for the fewest others: the other waits follow from this one.
    nearest = now.at[min(waiters, key=lambda number: (len(now.waits[number]), number))]
    kinds = {"left": "left_early", "late": "straggler", "loading": _kind_of_loading(now, free)}
    kind = kinds.get(first.kind) or _kind_of_wait(now, nearest)
    if nearest.rank.awaited or first.rank.awaited:
        kind = "no_key"
    if now.at_ns and all(_on_its_way(now.at[number], nearest, now) for number in free):
        kind = "straggler"
    at_one_line = {(now.at[number].kind, now.at[number].line) for number in free} == {("idle", first.line)}
    named = () if at_one_line and 2 * len(free) > now.size else tuple(free)
    return Finding(named, "end of the waits", kind, now, others=(nearest.rank.rank,))


def _kind_of_wait(now: Scene, waiter: Place) -> str:
    if waiter.pairwise and peers(waiter):
        return "unmatched"
    return "mismatch" if waiter.collective and now.split else "never_joined"


def _kind_of_loading(now: Scene, loading: Sequence[int]) -> str:
    """Whether a worker has died (torch checks only every 5 s) or is stuck."""
    looks = [now.at[number].rank.look for number in loading]
    return "loader_dead" if any(look and look.dead_workers for look in looks) else "loader_stuck"


def _on_its_way(late: Place, waiter: Place, now: Scene) -> bool:
    """Whether a rank that computed, slept or waited for the disk would still have reached the call another waited in.

    Compares their lines in the innermost function that both are in: the late rank is before that call, or in an earlier
    turn of a loop that makes that call in every turn.
    """
    call = waiter.collective
    sleeps = late.kind == "idle" and late.line is not None and "sleep(" in late.line.source
    if call is None or late.rank.handling or not (late.kind == "busy" or late.at_disk or sleeps):
        return False
    for own, theirs in zip(late.rank.own_frames, waiter.rank.own_frames, strict=False):
        if (own.file, own.name) != (theirs.file, theirs.name):
            return False
        if own.line != theirs.line:
            return own.line < theirs.line or now.in_an_earlier_turn(late, call)
    return True


def _stopped(now: Scene, ranks: Sequence[Rank]) -> Finding | None:
    """The ranks that are stopped by SIGSTOP, and the ranks that stopped them."""
    found = now.of_kind("stopped")
    for number in sorted(found):
        by = sent_by(now.at[number].rank, "SIGSTOP", ranks)
        if by:
            found.add(by[0])
    return Finding(tuple(sorted(found)), "signal", "stopped_process", now) if found else None


def _holds_a_lock(now: Scene) -> Finding | None:
    """The rank that holds the lock on a file for which others wait, and waits for no lock itself."""
    waits, holders = set(), set()
    for number, place in now.at.items():
        if place.rank.look and place.rank.look.locked_by in now.at:
            waits.add(number)
            holders.add(place.rank.look.locked_by)
    free = holders - waits
    if len(free) != 1:
        return None
    kind = "never_joined" if now.waiting else "silent"
    return Finding(tuple(free), "lock", kind, now, others=tuple(sorted(waits)))


def _nobody_waits(now: Scene) -> Finding:
    """The ranks to name where no rank waits for another: at their DataLoader, or all alike at one line."""
    loading = sorted(now.of_kind("loading"))
    if loading:
        return Finding(tuple(loading), "nobody waits", _kind_of_loading(now, loading), now)
    alive = sorted(now.of_kind("busy", "idle"))
    alike = len({(now.at[number].kind, now.at[number].line) for number in alive}) == 1
    kind = "busy" if now.of_kind("busy") else "silent"
    for place in now.at.values():
        for frames in place.rank.helpers:
            if is_joining(frames, once_more=True):
                alike, kind = alike and len(alive) == now.size, "spawned"
    return Finding(tuple(alive) if alike else (), "nobody waits", kind, now)
