"""Says who holds up ranks that wait for a process group to come up: one that asks elsewhere, one that never came."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddpkit.runfolder.ranks import Joining, Rank

from .finding import Finding, against_most, ranks_said, verb
from .standing import Standing, at_line, instead, is_in, with_line

_MAKES_STORE = re.compile(r"\bTCPStore\(")
_NOBODY_LISTENS = re.compile(r"connectFullMesh failed.*Connection refused", re.DOTALL)


def while_joining(joining: Sequence[Standing], at: Mapping[int, Standing], live: bool) -> Finding:
    """Ranks wait in `init_process_group`, or for its store: for one that asks elsewhere or never came, or for one too many."""
    attempt = max(s.rank.attempt for s in at.values())
    if refused := [n for n, s in at.items() if met_an_old_address(s.rank)]:
        ended = "was given the address of a process that had ended: the store kept it from the attempt before"
        return Finding((), f"In attempt {attempt + 1}, rank {refused[0]} {ended}.", "stale_addresses")
    if asked_amiss := _asked_amiss(joining, at):
        return asked_amiss
    absent = [n for n, s in at.items() if s.kind != "joining"]
    meeting, where = "init_process_group", " in init_process_group"
    if not any(s.rank.joining for s in joining):
        meeting, where = "the store", f" for the others{at_line(joining[0])}"
    if attempt and all(at[n].rank.collectives for n in absent):
        kept = f"this is attempt {attempt + 1}, and the store may have kept addresses from the one before"
        return Finding((), f"{_who_waits(joining, absent, where)}: {kept}.", "stale_addresses")
    late = tuple(s.rank.rank for s in joining)
    if not attempt and absent and all(_has_met(at[n].rank, late) for n in absent):
        others = "; ".join(f"rank {n} {at[n].words}" for n in absent)
        through = f"though {ranks_said(absent).lower()} {verb(absent, 'has', 'have')} come through it: {others}"
        waits = f"{ranks_said(late)} {verb(late, 'waits', 'wait')}{at_line(joining[0])}"
        return Finding(late if len(late) < len(absent) else (), f"{waits}, {through}.", "never_joined")
    if absent:
        first = at[absent[0]]
        does = instead(first, absent)
        came = "has not come" if live else "never came"
        in_vain = any(s.rank.failure for s in joining)
        waits = "waited in vain" if in_vain else verb(joining, "waits there", "wait there")
        opening = f"{ranks_said(absent)} {came} to {meeting}; {does}."
        sentence = f"{opening} {ranks_said([s.rank.rank for s in joining])} {waits}{at_line(joining[0])}."
        return Finding(tuple(absent), sentence, "init_waiting")
    return Finding((), f"Every rank waits{where}, and none can be told to be at fault.", "init_waiting")


def _has_met(rank: Rank, others: Sequence[int]) -> bool:
    """Whether this rank has come into a process group with all these."""
    return any(set(others) <= set(group) for group in rank.groups)


def _who_waits(joining: Sequence[Standing], through: Sequence[int], where: str) -> str:
    """`Every rank waits`, or who does though others have come through."""
    if not through:
        return f"Every rank waits{where}"
    waits = f"{ranks_said([s.rank.rank for s in joining])} {verb(joining, 'waits', 'wait')}{where}"
    return f"{waits}, though {ranks_said(through).lower()} {verb(through, 'has', 'have')} come through it"


def met_an_old_address(rank: Rank) -> bool:
    """Whether a rank of a restart was refused where another one should have been."""
    failure = rank.failure if rank.attempt else None
    return failure is not None and bool(_NOBODY_LISTENS.search(failure.message))


def _asked_amiss(joining: Sequence[Standing], at: Mapping[int, Standing]) -> Finding | None:
    """Who asked for another store than torchrun's, for a rank that is another's, or for another world size."""
    if of_their_own := _at_stores_of_their_own(at):
        return of_their_own
    asked = {s.rank.rank: s.rank.joining for s in joining if s.rank.joining}
    masters = {n: s.rank.master for n, s in at.items() if s.rank.master}
    astray = [n for n, j in asked.items() if j.master and n in masters and _leads_elsewhere(j.master, masters[n])]
    if len(astray) == len(at) == len(joining) and (differing := _at_different_stores(asked, joining)):
        return differing
    if len(astray) == len(at) == len(joining) and all(_by_another_port(asked[n].master, masters[n]) for n in astray):
        addresses = list(dict.fromkeys(asked[n].master for n in astray))
        asked_at = f"at {addresses[0]}, which is" if len(addresses) == 1 else f"elsewhere, {' and '.join(addresses)},"
        sentence = f"Every rank asked for the store {asked_at} not where torchrun has it; all wait in vain"
        return Finding(tuple(astray), f"{sentence}{at_line(joining[0])}.", "init_elsewhere")
    # Where all that have come asked elsewhere alike, they wait for the one that has not.
    if astray and len(astray) < len(asked):
        vain = "which is not where torchrun has it; the others wait in vain"
        sentence = f"{ranks_said(astray)} asked for the store at {asked[astray[0]].master}, {vain}."
        return Finding(tuple(astray), sentence, "init_elsewhere")
    named = {n: s.rank.joining.rank for n, s in at.items() if s.rank.joining}
    doubles = [n for n, name in named.items() if name not in (-1, n) and list(named.values()).count(name) > 1]
    if doubles:
        number = doubles[0]
        said = f"Rank {number} asked to join as rank {named[number]}, and nobody came as rank {number}"
        return Finding(tuple(doubles), f"{said}; all wait in vain{at_line(joining[0])}.", "init_waiting")
    return of_another_size(at)


def _at_different_stores(asked: Mapping[int, Joining], joining: Sequence[Standing]) -> Finding | None:
    """Who asks for another store than most, where all ask elsewhere than torchrun has one."""
    addresses = {n: _by_one_name(j.master) for n, j in asked.items()}
    if len(set(addresses.values())) == 1:
        return None
    said = "; ".join(f"rank {n} at {asked[n].master}" for n in sorted(asked))
    opening = f"The ranks ask for different stores{at_line(joining[0])}: {said}."
    found = against_most(addresses, opening, "init_elsewhere")
    return found if found.ranks else None


def makes_a_store(standing: Standing) -> bool:
    """Whether this rank is at the line where it makes a store, which waits in C++ for those that are to meet there."""
    return standing.place is not None and bool(_MAKES_STORE.search(standing.place.source))


def _at_stores_of_their_own(at: Mapping[int, Standing]) -> Finding | None:
    """Who is at another store than most, where the program makes it and some rank still waits for the others to meet there."""
    stores = {n: s.rank.store for n, s in at.items() if s.rank.store}
    at_one = [s for s in at.values() if s.rank.store and makes_a_store(s)]
    if not at_one or len({_by_one_name(store) for store in stores.values()}) == 1:
        return None
    said = "; ".join(f"rank {n} at {store}" for n, store in sorted(stores.items()))
    opening = f"The ranks make or look for different stores{at_line(at_one[0])}: {said}."
    found = against_most({n: _by_one_name(store) for n, store in stores.items()}, opening, "init_elsewhere")
    return found if found.ranks else None


def nobody_has_the_store(at: Mapping[int, Standing]) -> Finding | None:
    """Every rank, where all look for the store at one address, and one has given up to look for it."""
    stores = {_by_one_name(s.rank.store) for s in at.values()}
    given_up = any(s.rank.failure and s.rank.failure.type == "DistNetworkError" for s in at.values())
    if len(stores) != 1 or not given_up or not all(s.rank.store and makes_a_store(s) for s in at.values()):
        return None
    first = at[min(at)]
    looked = f"Every rank looked for a store at {first.rank.store}, where nobody has one"
    return Finding(tuple(at), f"{looked}{at_line(first)}.", "init_elsewhere")


def of_another_size(at: Mapping[int, Standing]) -> Finding | None:
    """The ranks that gave another world size than torchrun's; they may even have found a group of that size."""
    world_size = max(s.rank.world_size for s in at.values())
    sizes = {n: s.rank.joining.world_size for n, s in at.items() if s.rank.joining}
    sizes = {n: size for n, size in sizes.items() if size != world_size}
    if not sizes:
        return None
    who = "Every rank" if len(sizes) == len(at) else ranks_said(sorted(sizes))
    size = next(iter(sizes.values()))
    sentence = f"{who} asked for a world size of {size}, but torchrun started {world_size} ranks."
    return Finding(tuple(sorted(sizes)), sentence, "init_waiting")


def _leads_elsewhere(asked: str, master: str) -> bool:
    """Whether two addresses are of different stores, as far as they tell."""
    return _by_one_name(asked) != _by_one_name(master)


def _by_one_name(address: str) -> str:
    """The address, with one name for a host that calls itself."""
    host, _, port = address.rpartition(":")
    return f"localhost:{port}" if host in ("127.0.0.1", "[::1]") else address


def _by_another_port(asked: str, master: str) -> bool:
    """Whether two addresses differ by more than the name of the host; a store in a file has no port."""
    port = asked.rpartition(":")[2]
    return port.isdigit() and port != master.rpartition(":")[2]


def making_a_group(waiting: Mapping[int, Standing]) -> Finding | None:
    """Some ranks make a new process group, which takes every rank, and others wait elsewhere, or have made fewer of them; None
    where none does, where neither are the most, or where the others wait in such a group: they made it, and nothing says who
    made one too many."""
    makers = {n: s for n, s in waiting.items() if is_in(s, "_new_group_with_tag")}
    others = {n: s for n, s in waiting.items() if n not in makers}
    if not makers:
        return None
    waits = f"{ranks_said(list(makers))} {verb(makers, 'waits', 'wait')}{at_line(next(iter(makers.values())))}"
    said = "; ".join(f"rank {n} {with_line(s)}" for n, s in sorted(others.items()))
    opening = f"{waits}. A new process group takes every rank" + (f", and {said}." if others else ", members or not.")
    asked = {n: s.rank.groups_asked for n, s in waiting.items()}
    for named in zip(*asked.values(), strict=False):
        if len(set(named)) > 1:
            by_rank = dict(zip(asked, named, strict=True))
            said = "; ".join(f"rank {n} names {list(ranks) or 'all'}" for n, ranks in sorted(by_rank.items()))
            opening = f"{waits}. A new process group must be of the same ranks for all: {said}."
            return against_most(by_rank, opening, "mismatch")
    begun = {n: s.rank.groups_made for n, s in waiting.items()}
    if len(set(begun.values())) > 1:
        counts = ", ".join(f"{count} by rank {n}" for n, count in sorted(begun.items()))
        found = against_most(begun, f"{opening} Groups begun are {counts}.", "mismatch")
        # Who has begun fewer has left one out.
        skipped = found.ranks and all(begun[n] < max(begun.values()) for n in found.ranks)
        return replace(found, kind="never_joined") if skipped else found
    in_a_new_one = any(s.collective and s.collective.group != "0" for s in others.values())
    if len(makers) == len(others) or not others or in_a_new_one:
        return None
    return against_most({n: n in makers for n in waiting}, opening, "mismatch")
