"""The ranks that keep a process group from coming up: they joined with wrong settings, or never came."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .finding import Finding
from .places import makes_a_store
from .waits import Scene, unlike

_NOBODY_LISTENS = re.compile(r"connectFullMesh failed.*Connection refused", re.DOTALL)
# Some stores use a file and have no port.
_PORT = re.compile(r":(\d+)$")


def while_joining(now: Scene) -> Finding:
    """The ranks that hold up those which wait in `init_process_group` or for its store.

    Example: rank 0 waits in init_process_group, rank 1 sleeps before it: rank 1.
    """
    found = _others_have_joined(now) or asked_amiss(now)
    if found:
        return found
    absent = tuple(sorted(set(now.at) - now.of_kind("joining")))
    return Finding(absent, "absent" if absent else "cannot be told", "init_waiting", now)


def _others_have_joined(now: Scene) -> Finding | None:
    """Some ranks join while others have finished joining: a few join a second time, or a restart found old addresses."""
    joining = tuple(sorted(now.of_kind("joining")))
    came_through = len(joining) < now.size
    met, refused, restart = True, False, 0
    for place in now.at.values():
        failure, restart = place.rank.failure, max(restart, place.rank.attempt)
        refused = refused or (failure is not None and bool(_NOBODY_LISTENS.search(failure.message)))
        if place.kind != "joining":
            came_through = came_through and bool(place.rank.collectives)
            met = met and any(set(joining) <= set(group) for group in place.rank.made.groups)
    if restart:
        nobody_absent = len(joining) == now.size
        return Finding((), "restart", "stale_addresses", now) if refused or came_through or nobody_absent else None
    few = joining if 2 * len(joining) < now.size else ()
    return Finding(few, "majority", "never_joined", now) if came_through and met else None


def asked_amiss(now: Scene) -> Finding | None:
    """The ranks that joined with another address, number or world size than torchrun gave them.

    Example: torchrun has the store at port 29500, and rank 1 looks for it at port 29501: rank 1.
    """
    made, asked = {}, {}
    numbers, sizes = [], []
    for number, place in sorted(now.at.items()):
        rank, joining = place.rank, place.rank.joining
        if rank.store:
            made[number] = _one_name(rank.store)
        if joining and joining.master:
            asked[number] = _one_name(joining.master)
        if joining and joining.rank not in (-1, number):
            numbers.append(number)
        if joining and joining.world_size != rank.world_size:
            sizes.append(number)
    addresses = made if any(map(makes_a_store, now.at.values())) else asked
    odd = _at_own_stores(made, now) if addresses is made else _at_torchruns(asked, now)
    if odd:
        said = "; ".join(f"rank {number} at {address}" for number, address in addresses.items())
        # If no rank has torchrun's address, the one that most ranks have is taken to be right.
        most = {address for number, address in addresses.items() if number not in odd}
        rule = "asked amiss" if most <= {_one_name(now.at[odd[0]].rank.master)} else "majority"
        return Finding(odd, rule, "init_elsewhere", now, detail=said)
    if not numbers and not sizes:
        return None
    what = "with another rank's number" if numbers else f"with a world size other than torchrun's {now.size}"
    return Finding(tuple(numbers or sizes), "asked amiss", "init_waiting", now, detail=what)


def _at_torchruns(asked: Mapping[int, str], now: Scene) -> tuple[int, ...]:
    """The ranks that look for the store at a wrong address; if all do, those whose address differs from most."""
    astray = []
    for number, address in asked.items():
        if address != _one_name(now.at[number].rank.master):
            astray.append(number)
    if len(astray) < len(asked) or len(astray) < now.size:
        # If all ranks that have come use a wrong address, they wait for those that have not come.
        return tuple(astray) if len(astray) < len(asked) else ()
    port, torchruns = _PORT.search(asked[astray[0]]), _PORT.search(now.at[astray[0]].rank.master)
    alike = len(set(asked.values())) == 1 and port and torchruns and port[1] != torchruns[1]
    return unlike(asked) or (tuple(astray) if alike else ())


def _at_own_stores(made: Mapping[int, str], now: Scene) -> tuple[int, ...]:
    """The ranks whose store differs from most; every rank, if no rank serves the store that all look for."""
    failures = [place.rank.failure and place.rank.failure.type for place in now.at.values()]
    nobody_has_it = "DistNetworkError" in failures and len(made) == now.size and len(set(made.values())) == 1
    return unlike(made) or (tuple(made) if nobody_has_it and all(map(makes_a_store, now.at.values())) else ())


def _one_name(address: str) -> str:
    """The address, with one name for the loopback host."""
    return re.sub(r"^(127\.0\.0\.1|\[::1\]):", "localhost:", address)
