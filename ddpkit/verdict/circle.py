"""Says who is at fault where every rank waits: the one that left the common way, or that has named another root.

Ranks may wait for each other in different collectives, or one may wait for what is in no record, a key of the store say.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from ddpkit.runfolder.calls import Collective

from .exchanges import (
    comes_sooner_than_ever,
    ends_a_chain,
    has_another_partner,
    has_broken_the_pairs,
    is_first_to_exchange,
    lost_with_its_handle,
    out_of_an_exchange,
    with_one_more,
    without_an_exchange,
)
from .finding import Finding, Odd, against_most, ranks_said, verb
from .joining import of_another_size
from .meshes import across_the_groups, against_its_order
from .parting import outvoted, strayed
from .rings import (
    has_a_new_neighbour,
    has_changed_its_turn,
    has_left_the_ring,
    has_named_another,
    has_passed_on_fewer,
    has_turned_round_too_soon,
    on_one_side,
    one_too_many_in_a_row,
    out_of_step,
    too_few_in_a_row,
)
from .servers import (
    has_asked_too_often,
    has_kept_an_answer,
    has_left_one_without_an_answer,
    has_not_sent_as_others,
    has_sent_fewer_to_a_server,
    of_any,
    owes_the_one_behind,
)
from .standing import (
    Standing,
    at_line,
    each,
    for_a_key,
    instead,
    is_at_a_key,
    is_exchanging,
    line_unsaid,
    missing_in,
    peers,
    same_line,
    thread_died_of,
    who_waits_there,
    whom_it_waits_for,
    with_line,
)
from .storekeys import left_unset
from .tags import of_another_tag, sent_to_another
from .turns import asks_too_soon, leaves_its_own_way, stayed_behind

_NOT_A_MEMBER = re.compile(r"Running (\w+) on global rank \d+ which does not belong to the given group")
BY_MOST = "after the same calls most ranks came to another one"


def of_different_roots(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> Finding | None:
    """Who has named another source or destination of a collective than the others; None where nobody is seen to have."""
    if len(waiting) == len(at) and (roots := _roots(waiting)):
        return _other_root(roots, waiting)
    if misled := _towards_one_who_has_gone_on(waiting, at):
        return _to_another_root(misled, waiting)
    return None


def _roots(waiting: Mapping[int, Standing]) -> dict[int, int]:
    """The source or destination that each rank gave to the call at which they all wait; empty where they agree."""
    roots = {n: root for n, s in waiting.items() if (root := _root(s)) is not None}
    first = waiting[min(waiting)].place
    at_one_line = all(same_line(s.place, first) for s in waiting.values())
    # Of ranks that are further on, the next one may well have another root.
    in_one = len({s.collective.key for s in waiting.values() if s.collective}) <= 1
    return roots if at_one_line and in_one and len(set(roots.values())) > 1 else {}


def _root(standing: Standing) -> int | None:
    """The source or destination of the collective in which this rank waits; None where it has none, or was not seen."""
    look, joined = standing.rank.look, standing.collective
    if look is None or look.root is not None or look.group_root is None:
        return look.root if look else None
    members = joined.ranks if joined else ()
    return members[look.group_root] if look.group_root < len(members) else None


def _other_root(roots: Mapping[int, int], waiting: Mapping[int, Standing]) -> Finding:
    """Ranks that wait at one line in a collective from, or to, different ranks."""
    said = "; ".join(f"rank {n} with rank {root}" for n, root in sorted(roots.items()))
    where = at_line(waiting[min(waiting)])
    opening = f"The ranks call one collective with different ranks as its source or destination{where}: {said}."
    return against_most(roots, opening, "mismatch")


def _towards_one_who_has_gone_on(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> dict[int, int]:
    """The ranks that wait in a collective to, or from, a root that has come through it, and that root. To none comes a gather
    or reduce without every rank of the group; from one a broadcast or scatter may come late to some, unless another rank
    that waits in it has named another root."""
    found = {}
    for number, standing in waiting.items():
        joined, root = standing.collective, _root(standing)
        if joined is None or root is None or root not in at:
            continue
        named = {_root(s) for s in waiting.values() if s.collective and s.collective.key == joined.key} - {None}
        through = any(c.key == joined.key and c.done for c in at[root].rank.collectives)
        if through and (joined.op in ("gather", "reduce") or len(named) > 1):
            found[number] = root
    return found


def _to_another_root(roots: Mapping[int, int], waiting: Mapping[int, Standing]) -> Finding:
    """Ranks that have joined a collective with a root that it did not have for the others."""
    first = min(roots)
    joined, root = whom_it_waits_for(waiting[first]), roots[first]
    said = f"{ranks_said(sorted(roots))} joined {joined} with rank {root} as its source or destination"
    gone_on = f"rank {root} has come through it without that, and so with another"
    return Finding(tuple(sorted(roots)), f"{said}; {gone_on}. {each(waiting)}", "mismatch")


def nobody_is_missing(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> Finding:
    """Every rank waits, or for whom they wait is not known."""
    shared = {s.collective.name for s in waiting.values() if s.collective} if len(waiting) == len(at) else set()
    # Ranks that all gave another size may have meant it: groups of their own.
    if (asked_amiss := of_another_size(at)) and len(asked_amiss.ranks) < len(at):
        return asked_amiss
    if len(shared) == 1 and all(s.collective for s in waiting.values()):
        every = f"Every rank has joined {whom_it_waits_for(waiting[min(waiting)])}, and it does not end"
        return Finding((), f"{every}: what holds it up cannot be told from this.", "stuck")
    if known := left_unset(waiting, at) or _outside_its_group(waiting, at):
        return known
    if beside := _beside_the_others(waiting, at):
        rest = {n: s for n, s in waiting.items() if n not in beside}
        kind = "no_key" if all(is_at_a_key(waiting[n]) for n in beside) else "never_joined"
        return Finding(beside, _never_joined(beside, rest, waiting), kind)
    setter = _only_one_to_set_a_key(waiting, at)
    if setter is not None and not is_at_a_key(waiting[setter]):
        for_it = {n: s for n, s in waiting.items() if n != setter}
        key = for_a_key(list(for_it.values())) or " for a key of the store"
        wait = f"{ranks_said(sorted(for_it))} wait{key}{at_line(next(iter(for_it.values())))}"
        does = f"rank {setter}, the only one left to set it, {with_line(waiting[setter])}"
        return Finding((setter,), f"{wait}; {does}.", "no_key")
    return _in_a_circle(waiting, at)


def _in_a_circle(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> Finding:
    """Ranks that wait for each other: whose calls tell that it left the common way, if any do."""
    said = "; ".join(f"rank {n} {with_line(s)}" for n, s in sorted(at.items()))
    known = all(s.collective or peers(s) or of_any(s) for s in waiting.values())
    who = (
        "All ranks wait" if len(waiting) == len(at) else ranks_said(sorted(waiting)) + verb(waiting, " waits", " wait")
    )
    each_other = len(waiting) == len(at) or (known and len(waiting) > 1)
    opening = f"{who} for each other: {said}." if each_other else f"{who}, for whom cannot be told: {said}."
    # Who has left is waited for by nobody here.
    still = {n: s for n, s in at.items() if s.kind != "left"}
    histories = {n: s.rank.calls for n, s in still.items()} if each_other and known else {}
    ranks, how = _left_the_way(waiting, still, histories)
    if not ranks and (on_one_side(waiting, still) or _each_in_another_group(waiting, still)):
        return Finding(tuple(waiting), f"{opening} Each does the same, and none meets another.", "all_waiting")
    if not ranks:
        return Finding((), f"{opening} Who is at fault cannot be told from this.", "all_waiting")
    if any(map(is_at_a_key, waiting.values())):
        kind = "no_key"
    elif any(map(is_exchanging, waiting.values())):
        kind = "unmatched"
    elif for_them := _that_they_have_gone_past(ranks, waiting, at):
        kind, opening = "never_joined", _never_joined(ranks, for_them, at)
    else:
        kind = "mismatch"
    return Finding(ranks, f"{opening} {ranks_said(ranks)} left the common way: {how}.", kind)


def _left_the_way(
    waiting: Mapping[int, Standing], at: Mapping[int, Standing], histories: Mapping[int, Sequence[Collective]]
) -> Odd:
    """Who did otherwise than the others, or than in earlier steps, and how; no ranks where nobody is seen to have."""
    if lost := lost_with_its_handle(waiting):
        return lost
    odd = _odd_among_alike(histories, at) or without_an_exchange(waiting)
    odd = () if any(ends_a_chain(n, waiting) for n in odd) else odd
    odd = _in_another_group(waiting, at) or odd or with_one_more(waiting, at)
    found = (odd, BY_MOST) if odd else across_the_groups({n: s.rank.collectives for n, s in at.items()})
    found = found or has_another_partner(waiting) or has_broken_the_pairs(waiting)
    found = found or has_left_one_without_an_answer(waiting) or owes_the_one_behind(waiting, at)
    found = found or has_asked_too_often(waiting, at)
    found = found or of_another_tag(waiting) or has_named_another(waiting, at) or out_of_an_exchange(waiting, at)
    found = found or too_few_in_a_row(waiting) or has_not_sent_as_others(waiting) or has_passed_on_fewer(waiting, at)
    found = found or has_kept_an_answer(waiting) or has_sent_fewer_to_a_server(waiting, at)
    found = found or has_turned_round_too_soon(waiting) or has_left_the_ring(waiting, at)
    found = found or sent_to_another(waiting) or has_a_new_neighbour(waiting, at)
    found = found or _left_its_group(waiting, at) or _lost_a_thread(at) or _went_astray(histories)
    found = found or against_its_order(histories)
    at_a_key = any(map(is_at_a_key, waiting.values()))
    found = found or (_went_astray({n: s.rank.keyed for n, s in at.items()}) if at_a_key else None)
    found = found or _waits_before_it_sets(waiting, at)
    found = found or one_too_many_in_a_row(waiting) or stayed_behind(histories) or asks_too_soon(waiting, at)
    found = found or has_changed_its_turn(waiting) or leaves_its_own_way(histories)
    return found or _alone_at_its_line(waiting) or (out_of_step(waiting, at), BY_MOST)


def _never_joined(ranks: Sequence[int], for_them: Mapping[int, Standing], at: Mapping[int, Standing]) -> str:
    """`Rank 1 never joined all_reduce #2; it waits in barrier #3 at line 9. Rank 0 waits there.`"""
    first = at[ranks[0]]
    never = f"{ranks_said(ranks)} never joined {whom_it_waits_for(next(iter(for_them.values())))}"
    return f"{never}; {instead(first, ranks)}{line_unsaid(first)}. {who_waits_there(for_them)}"


def _that_they_have_gone_past(
    ranks: Sequence[int], waiting: Mapping[int, Standing], at: Mapping[int, Standing]
) -> dict[int, Standing]:
    """Those who wait for just these ranks in a collective, while these are in one of another group: with others, or by another
    call than any of them. None where they came to both by one way, as where a loop over the groups has another order."""
    for_them = {n: s for n, s in waiting.items() if s.collective and missing_in(s, at, None) == sorted(ranks)}
    own = [s.collective for n, s in waiting.items() if n in ranks]
    one_way = {(c.call, c.path) for c in own if c} & {
        (s.collective.call, s.collective.path) for s in for_them.values() if s.collective
    }
    others = [s.collective for n, s in waiting.items() if s.collective and n not in ranks]
    joined, calls, groups = {c.key for c in others}, {c.call for c in others}, {c.group for c in others}
    past = all(c and (c.key in joined or not (c.call in calls or c.group in groups)) for c in own)
    return for_them if past and not one_way else {}


def _left_its_group(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> Odd | None:
    """The one rank of a group that went on to a collective of all, in which the ranks of no such group are, while all others
    of it, two or more, wait for it in one of the group. One other is enough in the first that the group ever has, if it never
    made the call that the rank went on to."""
    of_all = {n: s.collective for n, s in waiting.items() if s.collective and set(s.collective.ranks) == set(at)}
    for joined in (s.collective for s in waiting.values() if s.collective and not s.collective.is_exchange):
        came = {n for n, s in at.items() if any(c.key == joined.key for c in s.rank.collectives)}
        left = set(joined.ranks) - came
        if len(left) != 1 or not left <= {*of_all}:
            continue
        number = left.pop()
        made = {c.call for n in came for c in at[n].rank.collectives}
        of_some = set(joined.ranks) < set(at) and len(of_all) > 1
        never_met = joined.seq == 1 and of_some and of_all[number].call not in made
        follow = {n for n, s in waiting.items() if came & {*missing_in(s, at, None)}}
        if (len(came) > 1 and set(at) - came == {*of_all}) or (never_met and set(at) == came | follow):
            on = f"it went on to {whom_it_waits_for(waiting[number])}"
            return (number,), f"{on}, and the rest of its group still waits in {joined.name}{joined.from_line}"
    return None


def _lost_a_thread(at: Mapping[int, Standing]) -> Odd | None:
    """The one rank of which a thread has ended by an exception."""
    lost = {n: died_of for n, s in at.items() if (died_of := thread_died_of(s.rank))}
    return ((*lost,), f"a thread of it has died of {next(iter(lost.values()))}") if len(lost) == 1 else None


def _went_astray(histories: Mapping[int, Sequence[Collective]]) -> Odd | None:
    """The rank that went from one call to another as no rank ever did."""
    # One line may serve groups of several sizes in turn.
    if not (found := strayed(histories) or strayed(histories, lambda call: (call.call, len(call.ranks)))):
        return None
    odd, before, after = found
    way = f"from {before.name}{before.from_line} it came to {after.name}{after.from_line}"
    return (odd,), f"{way}, as nobody else ever did"


def _alone_at_its_line(waiting: Mapping[int, Standing]) -> Odd | None:
    """The one rank that waits in a collective, where all others, two or more, left no record but that each waits at one other
    line: those that an alarm has ended."""
    unrecorded = {n: s for n, s in waiting.items() if not s.rank.collectives and not is_at_a_key(s)}
    recorded = [n for n in waiting if n not in unrecorded]
    if len(recorded) != 1 or len(unrecorded) < 2:
        return None
    first, alone = next(iter(unrecorded.values())), waiting[recorded[0]]
    together = all(same_line(s.place, first.place) for s in unrecorded.values())
    if not together or same_line(alone.place, first.place):
        return None
    return (recorded[0],), f"each of the others was{at_line(first)}"


def _beside_the_others(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> tuple[int, ...]:
    """The few that wait for something that is in no record, a key of the store say, or for a message to which nobody else has
    come yet, or they themselves never so soon, while all others, who are more, wait in one collective for them."""
    few = [n for n, s in sorted(waiting.items()) if s.collective is None and (not s.pairwise or _is_ahead(s, at))]
    others = [s for n, s in waiting.items() if n not in few]
    alone = len(waiting) == len(at) and len(few) < len(others)
    return tuple(few) if alone and all(s.collective and missing_in(s, at, None) == few for s in others) else ()


def _is_ahead(waiter: Standing, at: Mapping[int, Standing]) -> bool:
    return is_at_a_key(waiter) or is_first_to_exchange(waiter, at) or comes_sooner_than_ever(waiter)


def _only_one_to_set_a_key(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> int | None:
    """The rank that waits for something else while all others, who are more than one, wait for one key of the store."""
    wanted = {n: s.rank.awaited for n, s in waiting.items() if not s.collective and is_at_a_key(s)}
    key, most = Counter(wanted.values()).most_common(1)[0] if wanted else ((), 0)
    return next(n for n in waiting if wanted.get(n) != key) if 1 < most == len(waiting) - 1 == len(at) - 1 else None


def _waits_before_it_sets(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> Odd | None:
    """The only rank that is left to set the key for which all others wait, where it waits for a key itself."""
    setter = _only_one_to_set_a_key(waiting, at)
    if setter is None:
        return None
    others = {n: s for n, s in waiting.items() if n != setter}
    return (setter,), f"it is the only one left to set the key for which {ranks_said(sorted(others)).lower()} wait"


def _in_another_group(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> tuple[int, ...]:
    """The ranks that wait in another process group than most, where both are groups of all ranks."""
    joined = {n: s.collective for n, s in waiting.items() if s.collective and set(s.collective.ranks) == set(at)}
    if len(joined) < len(at):
        return ()
    group, most = Counter(c.group for c in joined.values()).most_common(1)[0]
    return tuple(n for n, c in sorted(joined.items()) if c.group != group) if 2 * most > len(at) else ()


def _each_in_another_group(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> bool:
    """Whether all ranks, three or more, wait in one call of the program, each in a group of its own: as where each has its own
    order of the groups."""
    joined = [s.collective for s in waiting.values() if s.collective]
    everyone = len(joined) == len(at) > 2
    return everyone and len({c.call for c in joined}) == 1 and len({c.group for c in joined}) == len(joined)


def _outside_its_group(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> Finding | None:
    """The ranks that torch has warned of a collective in a group of which they are no member, which it then leaves out, if
    others wait for each of them in such a collective of a group."""
    awaited = {(n, s.collective.op) for s in waiting.values() if s.collective for n in missing_in(s, at, None)}
    outside = {n: op for n, s in at.items() for op in _NOT_A_MEMBER.findall(s.rank.stderr) if (n, op) in awaited}
    if not outside:
        return None
    member = verb(outside, "it is no member", "they are no members")
    called = f"{ranks_said(sorted(outside))} called {outside[min(outside)]} in a group of which {member}"
    waits = each({n: s for n, s in waiting.items() if set(missing_in(s, at, None)) & set(outside)})
    return Finding(tuple(sorted(outside)), f"{called}, and torch left it out, with a warning. {waits}", "never_joined")


def _odd_among_alike(histories: Mapping[int, Sequence[Collective]], at: Mapping[int, Standing]) -> tuple[int, ...]:
    """The ranks that made another call than most, after the same calls, and wait in it, or are waited for in the one that most
    made, where all ranks have groups of the same sizes: as in a mesh, in which each runs the same program."""
    alike = len({tuple(sorted(map(len, s.rank.groups))) for s in at.values()}) == 1
    odd = outvoted(histories) if alike and histories else {}
    return tuple(odd) if all(at[n].collective is call or _owes(n, call, at) for n, call in odd.items()) else ()


def _owes(number: int, made: Collective, at: Mapping[int, Standing]) -> bool:
    """Whether another rank waits for this one in the call that it made when this one `made` another, of a collective too."""
    turn = at[number].rank.calls.index(made)
    return not made.is_exchange and any(
        s.collective in s.rank.calls[turn : turn + 1] and missing_in(s, at, None) == [number]
        for n, s in at.items()
        if n != number
    )
