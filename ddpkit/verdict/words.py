"""Every sentence of the verdict: which rank, what it did or did not do, where; who waits for it, where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpkit.runfolder.account import Ending
from ddpkit.runfolder.calls import Collective
from ddpkit.runfolder.ranks import Rank

from .ends import sent_by
from .finding import Finding
from .phrases import at, did, did_alike, doing, helper, in_brackets, ranks_said, then_did
from .places import Place

_UNTOLD = "Which of them is wrong cannot be told."
_NOBODY = Rank(-1, -1, 0, Path(), None)


@dataclass(frozen=True)
class Facts:
    """The facts of a sentence. `who`: `rank 1` or `every rank`; `first`: the first rank at fault; `other`: the first of the
    finding's `others`; `places`: where each rank was."""

    found: Finding
    ranks: Mapping[int, Rank]
    ending: Ending
    who: str
    first: Rank
    other: Rank
    places: Mapping[int, Place]


def sentence(found: Finding, ranks: Sequence[Rank], ending: Ending) -> str:
    """The verdict in a sentence or two; "" for a job that passed."""
    by_rank = {rank.rank: rank for rank in ranks}
    who = "every rank" if len(found.ranks) == len(ranks) > 1 else ranks_said(found.ranks or (-1,))
    first, other = by_rank.get(min(found.ranks or (-1,))), by_rank.get(min(found.others or (-1,)))
    facts = Facts(found, by_rank, ending, who, first or _NOBODY, other or _NOBODY, found.now.at if found.now else {})
    said = (_SAID.get(f"{found.rule}/{found.kind}") or _SAID[found.rule])(facts).strip()
    if found.ranks and found.calls and found.rule in _WITH_CALLS:
        said += f" {_joined(facts)}"
    if found.ranks and found.now and found.rule in _WITH_WAITS:
        said += f" {_who_waits(facts)}"
    for begins in ("rank", "every", "no"):
        said = said.replace(f". {begins}", f". {begins.capitalize()}")
    if not said.startswith("torchrun"):
        said = said[:1].upper() + said[1:]
    return " ".join(filter(None, [said.rstrip(), _why_ended(ending)]))


def _why_ended(ending: Ending) -> str:
    if ending.by or not ending.reason:
        return ending.by
    if ending.reason == "timeout":
        return f"The job ran longer than timeout={ending.timeout_s:g} s and was ended."
    if ending.reason == "stall":
        return f"No rank made progress for stall={ending.stall_s:g} s and the job was ended."
    return "The job was stopped."


def _do(numbers: Sequence[int], one: str, more: str) -> str:
    """`rank 1 waits`, `ranks 0 and 2 wait`."""
    return f"{ranks_said(numbers)} {one if len(numbers) == 1 else more}"


def _does(f: Facts) -> str:
    """What the first of the ranks at fault does instead of joining."""
    first, *more = f.found.ranks
    return f"{ranks_said([first]) if more else 'it'} {doing(f.places[first])}.{helper(f.places[first])}"


def _each(f: Facts, some: Iterable[int] | None = None) -> str:
    """`rank 0 waits in barrier #4; rank 1 sits at line 9`, for all ranks or for some."""
    return "; ".join(f"rank {each} {doing(f.places[each])}" for each in sorted(f.places if some is None else some))


def _at(rank: Rank) -> str:
    return at(rank.failure.where if rank.failure else rank.at)


def _other_did(f: Facts) -> str:
    return f"rank {f.other.rank} {did(f.other)}."


def _lost_it(f: Facts) -> str:
    return f"rank {f.other.rank} lost {'them' if f.found.ranks[1:] else 'it'}{_at(f.other)}." * bool(f.found.others)


def _signal(f: Facts) -> str:
    """`rank 0 sent SIGKILL to rank 1 (line 7: os.kill(pid, 9)).`"""
    for number in f.found.ranks:
        for name in (f.ranks[number].signal or "", "SIGSTOP"):
            sent = sent_by(f.ranks[number], name, list(f.ranks.values()))
            if sent:
                return f"rank {sent[0]} sent {name} to rank {number}{in_brackets(sent[1])}."
    return ""


def _all_did(f: Facts) -> str:
    return f"after that every rank {did_alike(list(f.ranks.values()))}."


def _brought(f: Facts) -> str:
    if f.found.detail:
        return f"{f.who} had nan in {f.found.detail}, where the others had a number; {_all_did(f)}"
    odd_first = sorted(f.ranks, key=lambda number: number not in f.found.ranks)
    said = [f"rank {number} brought {_value(f.found.calls[number])}" for number in odd_first]
    return f"{'; '.join(said)} to {_call(f)}; {_all_did(f)}"


def _value(call: Collective) -> str:
    return "an object of its own" if call.reduces == "object" else f"{call.brings:g}"


def _reported(f: Facts) -> str:
    ended = "left with exit code 0" if f.first.exitcode == 0 else "was ended"
    return f"{_other_did(f)} {f.who} raised nothing and {ended}{at(f.first.left_at or f.first.at)}."


def _differs(f: Facts) -> str:
    if not f.found.ranks:
        all_groups = "Every rank must make all groups, also those that it is not in. "
        return f"{all_groups if f.found.rule == 'groups' else ''}{_UNTOLD}"
    return "no two of them agree." if f.who == "every rank" else f"{_do(f.found.ranks, 'differs', 'differ')} from most."


def _wanted(f: Facts, came: str = "come") -> str:
    """`joined all_reduce #10 (line 17: ...)`, `set the key "done/2"`, or `come to what rank 0 waits for at line 9`."""
    waiter = f.places[f.found.others[0]]
    keys = waiter.rank.awaited
    if keys:
        return f"set the key{'s' if len(keys) > 1 else ''} " + ", ".join(f'"{key}"' for key in keys)
    if waiter.collective:
        return f"joined {waiter.collective.name}{waiter.collective.from_line}"
    return f"{came} to what rank {waiter.rank.rank} waits for{at(waiter.line)}"


def _never(f: Facts) -> str:
    """`rank 1 never joined ...`; of a job that still runs, `rank 1 has not joined ...`."""
    if f.ending.running:
        return f"{'every rank has' if f.who == 'every rank' else _do(f.found.ranks, 'has', 'have')} not {_wanted(f)}"
    return f"{f.who} never {_wanted(f, 'came')}"


def _who_waits(f: Facts) -> str:
    """`rank 0 waits for it.`, or where each rank waits if they wait in different calls."""
    waits = f.found.now.waits if f.found.now else {}
    held = [number for number, whom in sorted(waits.items()) if whom and number not in f.found.ranks]
    if len({doing(f.places[number]) for number in held}) > 1:
        return f"{_each(f, held)}."
    if any(f.ranks[number].failure for number in held):
        return f"{ranks_said(held)} waited for it and failed."
    return f"{_do(held, 'waits', 'wait')} for it." if held else ""


def _end_of_the_waits(f: Facts) -> str:
    if not f.found.ranks:
        return f"most ranks are at one line: {_each(f)}. What they wait for there is not recorded. {_UNTOLD}"
    handles = f" It is handling {f.first.handling}." if f.first.handling else ""
    return f"{_never(f)}; {_does(f)}{handles}"


def _straggler(f: Facts) -> str:
    if f.places[f.found.ranks[0]].kind == "late":
        return f"{f.who} {_wanted(f, 'came')} only after the others had given up."
    return f"{f.who} had not {_wanted(f)} when the others gave up; {_does(f)}"


def _nobody_waits(f: Facts) -> str:
    if not f.found.ranks:
        return f"no rank waits for another: {_each(f)}."
    place = f.places[f.found.ranks[0]]
    return f"{f.who} {doing(place)}.{helper(place)}"


def _stopped(f: Facts) -> str:
    stopped = sorted(f.found.now.of_kind("stopped")) if f.found.now else []
    return f"{_each(f, stopped)}. {_signal(f)}"


def _who_joins(f: Facts) -> str:
    """`ranks 0 and 2 wait in init_process_group (line 8: ...).`"""
    joining = sorted(f.found.now.of_kind("joining")) if f.found.now else []
    if not joining:
        return "every rank waited for its process group."
    first = f.places[joining[0]]
    where = "in init_process_group" if first.rank.joining else "for the store"
    waits = ("waited", "waited") if first.rank.failure else ("waits", "wait")
    return f"{_do(joining, *waits)} {where}{in_brackets(first.line)}."


def _joined(f: Facts) -> str:
    """`as collective #7, ranks 0 and 2 joined all_reduce of [4] Float (line 9: ...), rank 1 barrier (line 12: ...).`"""
    calls = f.found.calls
    by_words: dict[str, list[int]] = {}
    for number, call in sorted(calls.items()):
        root = f" from or to rank {call.root}" if call.root is not None else ""
        by_words.setdefault(f"{call.shape_words}{root}{call.from_line}", []).append(number)
    said = "; ".join(f"{ranks_said(numbers)} joined {words}" for words, numbers in by_words.items())
    return f"As collective #{next(iter(calls.values())).seq}, {said}."


def _loop(f: Facts) -> str:
    now, loop = f.found.now, f.found.detail
    in_it = now is not None and loop in now.loops(f.found.calls[f.found.ranks[0]])
    said = _do(f.found.ranks, *(("is still in", "are still in") if in_it else ("has left", "have left")))
    inner = next(call for call in f.found.calls.values() if now and loop in now.loops(call))
    file, _, line = loop.rpartition(":")
    other_file = f" of {Path(file).name}" if inner.where and inner.where.elsewhere else ""
    skipped_by = now.program.skipped_by(inner.path, loop) if now else 0
    why = f": line {skipped_by} (continue) may skip it, in which turn is not recorded" if skipped_by else ""
    return f"{said} the loop in line {line}{other_file}; {_turns(f, inner)}{why}."


def _turns(f: Facts, call: Collective) -> str:
    """`rank 0 called all_reduce there 8 times, rank 1 7 times`: up to where the ranks parted."""
    said: list[str] = []
    for number, last in sorted(f.found.calls.items()):
        calls = f.found.now.calls[number] if f.found.now else ()
        times = sum(own.call == call.call and own.at_ns <= last.at_ns for own in calls)
        said.append(f"rank {number} {'' if said else f'called {call.op} there '}{times} time{'s' * (times != 1)}")
    return ", ".join(said)


def _call(f: Facts, number: int | None = None) -> str:
    call = f.found.calls[f.found.ranks[0] if number is None else number]
    return f"{call.name}{call.from_line}"


def _untold(f: Facts) -> str:
    if f.found.calls:
        return f"{_joined(f)} {_UNTOLD}"
    if f.places:
        return f"the ranks wait for each other: {_each(f)}. {_UNTOLD}"
    return "how the ranks ended is not fully recorded: the culprit cannot be told."


# By rule, or by rule and kind where a rule has several sentences.
_SAID: dict[str, Callable[[Facts], str]] = {
    # Question 1.
    "signal": _signal,
    "exception": lambda f: f"{f.who} failed with {f.found.detail}; {_does(f)}",
    "alike": lambda f: f"{f.who} {did_alike([f.ranks[number] for number in f.found.ranks])}.",
    "tie": lambda f: (
        f"a tie: {'; '.join(f'rank {n} {did(f.ranks[n])}' for n in f.found.others)}, within a millisecond."
    ),
    "first": lambda f: f"{f.who} {did(f.first)}.{then_did(f.first)}" + f" Later {_other_did(f)}" * bool(f.found.others),
    "named by a rank": _other_did,
    "reported": _reported,
    "reported/unknown": lambda f: f"{_other_did(f)} Which rank failed is not recorded: the culprit cannot be told.",
    "left": lambda f: f"{f.who} left early with exit code 0{at(f.first.left_at)}; {_lost_it(f)}",
    # Question 2.
    "signal/stopped_process": _stopped,
    "monitored barrier": lambda f: f"{f.who} never came to the barrier of rank {f.other.rank}{_at(f.other)}.",
    "restart": lambda f: (
        f"in attempt {f.ranks[min(f.ranks)].attempt + 1} {_who_joins(f)} "
        "The store may still hold addresses of ranks that have ended."
    ),
    "asked amiss": lambda f: f"{f.who} asked to join {f.found.detail}. {_who_joins(f)}",
    "asked amiss/init_elsewhere": lambda f: (
        f"{f.who} looked for the store at a wrong address: {f.found.detail}. torchrun's is at {f.first.master}."
    ),
    "absent": lambda f: f"{f.who} never joined; {_does(f)} {_who_joins(f)}",
    "lock": lambda f: f"{f.who} holds the lock on a file for which rank {f.other.rank} waits{_at(f.other)}; {_does(f)}",
    "nobody waits": _nobody_waits,
    "end of the waits": _end_of_the_waits,
    "end of the waits/straggler": _straggler,
    "key": lambda f: f"{_never(f)}; {_does(f)}",
    # Question 3.
    "numbers": _brought,
    "models differ": lambda f: f"the ranks built different models: {f.found.detail}. {_differs(f)}",
    "groups": lambda f: f"not all ranks make the same process groups: {f.found.detail}. {_differs(f)}",
    "majority": lambda f: f"{f.who} joined a different collective than most ranks.",
    "majority/never_joined": lambda f: f"{_who_joins(f)} All other ranks have already returned from it.",
    "loop": _loop,
    "step": lambda f: f"{f.who} called {_call(f)} in an order that no rank had used before.",
    "next call": lambda f: (
        f"{f.who} called {_call(f)}; after the same calls, most ranks called "
        f"{_call(f, min(set(f.found.calls) - set(f.found.ranks)))}."
    ),
    "habit": lambda f: f"{f.who} called {_call(f, 1)} after {_call(f, 0)}, as it had never done before.",
    "debt": lambda f: f"{f.who} sent one message too few, compared with what it sent to others or what they sent.",
    "if": lambda f: f"only {f.who} called {_call(f)}, because of the `if` in {f.found.detail}.",
    "cannot be told": _untold,
    "cannot be told/init_waiting": lambda f: f"{_who_joins(f)} Why they do not find each other cannot be told.",
    # The job as a whole.
    "unknown": _untold,
    "unknown/agent_failed": lambda f: f"torchrun ended before any rank had started: {f.ending.agent_error}",
    "agent/agent_killed": lambda f: f"{f.ending.agent_death}; then its ranks were ended.",
    "agent/node_lost": lambda f: f"{f.ending.nodes_gone}; {f.who} ran there. {_lost_it(f)}",
    "agent/agent_failed": lambda f: f"every rank passed, but torchrun failed: {f.ending.agent_error}",
    "ended": lambda f: "",
    "passed": lambda f: "",
}
_SAID["majority/init_elsewhere"] = _SAID["asked amiss/init_elsewhere"]
_WITH_CALLS = ("majority", "loop", "step", "if")
_WITH_WAITS = ("end of the waits", "signal", "exception", "key", "next call", "habit", "debt")
