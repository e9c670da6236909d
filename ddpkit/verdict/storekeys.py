"""Says who has left a key of a store unset for which others wait, from whose the keys were that were set."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ddpkit.runfolder.calls import Collective
from ddpkit.runfolder.frames import Frame
from ddpkit.runfolder.ranks import Rank

from .finding import Finding, ranks_said, verb
from .standing import Standing, at_line, same_line, with_line

_NUMBER = re.compile(r"(\d+)")

# By rank the keys that it has set, each with its line.
Keys = Mapping[int, Mapping[str, Frame | None]]


def left_unset(waiting: Mapping[int, Standing], at: Mapping[int, Standing]) -> Finding | None:
    """Who has not set the key for which ranks wait, where the keys that were set tell whose it is; None where they do not."""
    keys = {n: s.rank.keys_set for n, s in at.items()}
    wanted: dict[str, list[int]] = {}
    for number, standing in sorted(waiting.items()):
        for key in standing.rank.awaited:
            if not any(key in own for own in keys.values()):
                wanted.setdefault(key, []).append(number)
    whose = {key: owner for key in wanted if (owner := _owner(key, keys)) is not None}
    in_step = {key: n for key, who in wanted.items() if (n := _in_step(key, waiting[who[0]], at, keys)) is not None}
    may_be = {key: next(iter(alike)) for key in wanted if len(alike := _alike(key, keys)) == 1}
    past = {key: owner for key, owner in (may_be | whose).items() if _is_past(owner, key, waiting, keys)} | in_step
    whose |= past
    # One that waits for a key of another may not have come to its own.
    held_up = {n for key, owner in whose.items() for n in wanted[key] if n != owner}
    at_fault = past or {key: owner for key, owner in whose.items() if owner not in held_up}
    if (len(whose) < len(wanted) and not past) or len(set(at_fault.values())) != 1:
        return None
    key, owner = next(iter(at_fault.items()))
    waiters = wanted[key]
    wait = f'{ranks_said(waiters)} {verb(waiters, "waits", "wait")} for the key "{key}" of the store'
    does = "" if owner in waiters else f" Rank {owner} {with_line(at[owner])}."
    return Finding((owner,), f"{wait}{at_line(waiting[waiters[0]])}; {_unset(key, owner, keys)}.{does}", "no_key")


def _owner(key: str, keys: Keys) -> int | None:
    """The one rank that is to set `key` by each of its numbers: by one that tells ranks from each other (a rank, or what goes
    round the ranks), or because it has set this key in other rounds, while others are set in this one."""
    by_number = _setters(key, keys)
    owners = set()
    for place, (number, setters) in enumerate(zip(_numbers(key), by_number, strict=True)):
        who = set(setters.values())
        if len(who) > 1 and all(n % len(keys) == rank for n, rank in setters.items()):
            # Beyond the last one it may be the reader that asks for one too many.
            if number < max(len(keys), *setters):
                owners.add(number % len(keys))
        elif len(who) == 1 < len(setters) and any(by_number[:place] + by_number[place + 1 :]):
            owners |= who
    owners = owners or _of_that_number(key, keys)
    return owners.pop() if len(owners) == 1 else None


def _of_that_number(key: str, keys: Keys) -> set[int]:
    """The ranks that `key` has the number of, where each key like it, of two ranks or more, has that of who set it."""
    alike = _alike(key, keys)
    if len(alike) < 2:
        return set()
    return {
        number
        for place, number in enumerate(_numbers(key))
        if number in keys and all(_numbers(k)[place] == rank for rank, own in alike.items() for k in own)
    }


def _is_past(owner: int, key: str, waiting: Mapping[int, Standing], keys: Keys) -> bool:
    """Whether `owner` has set a later one, or waits for what another rank waits for at the same line, which has set its own in
    place of `key`, or waits once more where it has always waited after it had set one like it."""
    number = _numbers(key)
    if len(number) == 1 and any(_numbers(other) > number for other in _alike(key, keys).get(owner, ())):
        return True
    here = waiting.get(owner)
    if here is None:
        return False
    others = {n for setters in _setters(key, keys) if len(set(setters.values())) > 1 for n in setters.values()} - {
        owner
    }
    beside = (waiting[n] for n in others if n in waiting)
    if any(s.rank.awaited == here.rank.awaited and same_line(s.place, here.place) for s in beside):
        return True
    lines = _alike(key, keys).get(owner, {}).values()
    sets = [c.op == "set" for c in here.rank.keyed if c.where in lines or same_line(c.where, here.place)]
    before = sets[:-1]
    return bool(before) and before == [True, False] * (len(before) // 2)


def _in_step(key: str, waiter: Standing, at: Mapping[int, Standing], keys: Keys) -> int | None:
    """The one rank that has set all keys like `key`, each after as many collectives as this one had joined when it asked for it,
    and has joined more than that since; None where there is none."""
    alike = _alike(key, keys)
    if len(alike) != 1 or waiter.rank.rank in alike:
        return None
    number, own = next(iter(alike.items()))
    owner, lines = at[number].rank, own.values()
    sets = [_joined_before(call, owner) for call in owner.keyed if call.op == "set" and call.where in lines]
    asked = [_joined_before(call, waiter.rank) for call in waiter.rank.keyed if same_line(call.where, waiter.place)]
    left_out = len(sets) > 1 and asked[:-1] == sets and len(owner.collectives) > asked[-1] > sets[-1]
    return owner.rank if left_out else None


def _joined_before(call: Collective, rank: Rank) -> int:
    return sum(joined.at_ns < call.at_ns for joined in rank.collectives)


def _setters(key: str, keys: Keys) -> list[dict[int, int]]:
    """For each number in `key`, which rank has set each key that differs from it in that one alone, by the other's number."""
    own_numbers = _numbers(key)
    found: list[dict[int, int]] = [{} for _ in own_numbers]
    for rank, own in _alike(key, keys).items():
        for numbers in map(_numbers, own):
            differing = [place for place, number in enumerate(own_numbers) if number != numbers[place]]
            if len(differing) == 1:
                found[differing[0]][numbers[differing[0]]] = rank
    return found


def _unset(key: str, owner: int, keys: Keys) -> str:
    """That `owner` has not set `key`, with the last one like it that it has set, or else with the line of the others'."""
    alike = _alike(key, keys)
    shown, line = list(alike[owner if owner in alike else min(alike)].items())[-1]
    from_line = f" ({line.text})" if line else ""
    if owner in alike:
        return f'rank {owner}, who set "{shown}"{from_line}, has not set it'
    return f"rank {owner} has not set it, as {ranks_said(sorted(alike)).lower()} set theirs{from_line}"


def _alike(key: str, keys: Keys) -> Keys:
    """The keys that differ from `key` in their numbers alone, of the ranks that have set any."""
    words = _NUMBER.split(key)[::2]
    alike = {n: {k: line for k, line in own.items() if _NUMBER.split(k)[::2] == words} for n, own in keys.items()}
    return {n: own for n, own in alike.items() if own}


def _numbers(key: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(key)]
