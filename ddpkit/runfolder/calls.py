"""Reads the calls of torch.distributed that a rank made into plain data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import wire
from .frames import Frame, Sources, read_frame

# Sizes may differ between the ranks that join one of these.
SIZES_MAY_DIFFER = ("gather", "reduce_scatter", "send", "recv", "alltoall", "all_to_all")
_WATCHDOG = re.compile(
    r"(?:PG (?:ID|GUID) (?P<group>\d+).*?)?Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)"
)


@dataclass(frozen=True, repr=False)
class Collective:
    """One call of torch.distributed by a rank: a collective, a send or receive, or a call of a store.

    A collective is the `seq`-th of its process group, from 1; `ranks` are the group's global ranks (() if torch does not
    tell), `setup` counts how often the group was set up again. A send or receive is the `seq`-th of its rank, with group
    "" and the other rank as `ranks`. `at_ns` and `over_ns`: the wall clock when it began and came back (0: it did not, or
    that was not kept); `done`: the flight recorder's own word. `where`: the user's line; `path`: the user's lines on the
    way to it as `file:line`, innermost first. `backend`: gloo, nccl or "". `root`: the rank from or to which it goes.
    `brings`: this rank's number for it, the sum of its numbers, or the checksum of an object; None if not kept.
    `reduces`: what is made of the ranks' numbers: SUM and so on, "object", or "" if they are only passed on.
    """

    seq: int
    op: str
    group: str
    group_name: str
    ranks: tuple[int, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    at_ns: int = 0
    done: bool = False
    where: Frame | None = None
    setup: int = 0
    backend: str = ""
    root: int | None = None
    brings: float | None = None
    reduces: str = ""
    over_ns: int = 0
    tag: int = 0
    path: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"{'done' if self.done else 'waiting'} in {self.name}{self.from_line}"

    @property
    def is_exchange(self) -> bool:
        """Whether it is a send or receive, which has no process group here."""
        return not self.group

    @property
    def name(self) -> str:
        """`all_reduce #9`, `all_reduce #9 of group 1`, or `send with rank 2`."""
        if self.is_exchange:
            with_whom = f"rank {self.ranks[0]}" if self.ranks else "any rank"
            return f"{self.op} with {with_whom}{f' (tag {self.tag})' if self.tag else ''}"
        if self.group == "store":
            return f"store.{self.op}"
        group = "" if self.group_name in ("default_pg", "") else f" of group {self.group}"
        anew = " after init_process_group was called again" if self.setup else ""
        return f"{self.op} #{self.seq}{group}{anew}"

    @property
    def key(self) -> tuple[int, str, int]:
        """Equal for all ranks that join the same collective."""
        return (self.setup, self.group, self.seq)

    @property
    def from_line(self) -> str:
        """` (line 21: dist.all_reduce(x))`, or "" if the line is not known."""
        return f" ({self.where.text})" if self.where else ""

    @property
    def call(self) -> tuple[object, ...]:
        """The operation and its line, which tell two calls of a program apart."""
        return (self.op, (self.where.file, self.where.line) if self.where else None)

    def matches(self, other: Collective) -> bool:
        """Whether two ranks agree on operation, root, type and sizes of a collective."""
        if self.op != other.op:
            return False
        if None not in (self.root, other.root) and self.root != other.root:
            return False
        # NCCL gathers tensors of different sizes; gloo does not.
        alike = self.op == "scatter" or (self.backend == "gloo" and "gather" in self.op)
        may_differ = not alike and any(word in self.op for word in SIZES_MAY_DIFFER)
        return {*self.dtypes} == {*other.dtypes} and (may_differ or self.sizes == other.sizes)

    @property
    def shape_words(self) -> str:
        """`all_reduce of [1000] Float`."""
        if not self.sizes:
            return self.op
        shapes = ", ".join(str(list(size)) if size else "scalar" for size in self.sizes[:2])
        return f"{self.op} of {shapes} {'/'.join(dict.fromkeys(self.dtypes))}".rstrip()


# What ranks joined as one collective: rank to call.
Together = dict[int, Collective]


def given_up_by_watchdog(words: str, where: Frame | None) -> Collective | None:
    """The collective that NCCL's watchdog gave up, by a process's last `words`; it failed at `where`."""
    said = _WATCHDOG.search(words)
    if said is None:
        return None
    op, group = said["op"].lower(), said["group"] or "0"
    return Collective(int(said["seq"]), op, group, "default_pg" if group == "0" else "", where=where)


@dataclass(frozen=True)
class Made:
    """The calls that a rank made: `calls` are its collectives, sends and receives in order.

    `keyed`: its calls of a store. `requested`: the ranks with which it is in a send or receive, or began one without
    waiting for it. `awaited`: the store keys that it waits for; `last_keys`: those of its last call; `keys_set`: those
    it has set, with their lines. `groups`: the global ranks of each of its process groups; `groups_asked`: the ranks
    that it named for each new group, () for all.
    """

    collectives: tuple[Collective, ...]
    calls: tuple[Collective, ...]
    keyed: tuple[Collective, ...]
    requested: tuple[int, ...]
    awaited: tuple[str, ...]
    last_keys: tuple[str, ...]
    keys_set: Mapping[str, Frame | None]
    groups: tuple[tuple[int, ...], ...]
    groups_asked: tuple[tuple[int, ...], ...]


def read_made(path: Path, cells: Sources) -> Made:
    """The calls in the record at `path`, oldest first; none if there is no record."""
    record = wire.read_record(path) or {}
    collectives, keyed = _collectives(record, cells), record.get("keyed", [])
    exchanges = _calls(record.get("exchanged", []), "", cells)
    return Made(
        collectives,
        calls=tuple(sorted((*collectives, *exchanges), key=lambda call: call.at_ns)),
        keyed=_calls(keyed, "store", cells),
        requested=tuple(record.get("requested", ())),
        awaited=tuple(record.get("awaited", ())),
        last_keys=tuple(keyed[-1]["keys"]) if keyed else (),
        keys_set=_keys_set(record, cells),
        groups=tuple(map(tuple, record.get("groups", ()))),
        groups_asked=tuple(map(tuple, record.get("groups_asked", ()))),
    )


def _keys_set(record: Mapping[str, Any], cells: Sources) -> dict[str, Frame | None]:
    calls = [call for call in record.get("keyed", []) if call["op"] == "set"] + record.get("set_beside", [])
    return {key: read_frame(call["where"], cells) for call in calls for key in call["keys"]}


def _calls(entries: Sequence[Mapping[str, Any]], group: str, cells: Sources) -> tuple[Collective, ...]:
    """A record's sends and receives (`group` is ""), or its calls of a store."""
    return tuple(
        Collective(
            seq=number,
            op=entry["op"],
            group=group,
            group_name=group,
            ranks=() if entry.get("peer") is None else (entry["peer"],),
            at_ns=entry["at_ns"],
            done=True,
            where=read_frame(entry["where"], cells),
            tag=entry.get("tag", 0),
        )
        for number, entry in enumerate(entries, 1)
    )


def _collectives(record: Mapping[str, Any], cells: Sources) -> tuple[Collective, ...]:
    """The collectives of a record, without its sends and receives."""
    last: dict[str, int] = {}
    setups: Counter[str] = Counter()
    found = []
    for entry in record.get("entries", []):
        if not entry["p2p"]:
            setups[entry["group"]] += entry["seq"] < last.get(entry["group"], 0)
            last[entry["group"]] = entry["seq"]
            found.append(_collective(entry, setups[entry["group"]], cells))
    return tuple(found)


def _collective(entry: Mapping[str, Any], setup: int, cells: Sources) -> Collective:
    return Collective(
        setup=setup,
        seq=entry["seq"],
        op=entry["op"],
        group=entry["group"],
        group_name=entry["group_name"],
        ranks=tuple(entry["ranks"]),
        sizes=tuple(map(tuple, entry["sizes"])),
        dtypes=tuple(entry["dtypes"]),
        at_ns=entry["at_ns"],
        done=entry["done"],
        where=read_frame(entry["where"], cells),
        backend=entry.get("backend", ""),
        root=entry.get("root"),
        brings=entry.get("brings"),
        reduces=entry.get("reduces", ""),
        over_ns=entry.get("over_ns", 0),
        path=tuple(entry.get("path", ())),
    )


def first_split(calls: Mapping[int, Sequence[Collective]]) -> Together:
    """The first collective that ranks joined as different ones: all_reduce #7 and barrier #7; {} if none."""
    by_number: dict[tuple[int, str, int], Together] = {}
    for number, history in calls.items():
        for call in history:
            if not call.is_exchange:
                by_number.setdefault(call.key, {})[number] = call
    for together in sorted(by_number.values(), key=began):
        if len(camps(together)) > 1:
            return together
    return {}


def began(together: Together) -> int:
    """When the first rank joined a collective."""
    return min(call.at_ns for call in together.values())


def camps(together: Together) -> list[list[int]]:
    """The ranks grouped by operation, size, type and root; smallest group first."""
    found: list[list[int]] = []
    for number, call in together.items():
        for camp in found:
            if together[camp[0]].matches(call):
                camp.append(number)
                break
        else:
            found.append([number])
    return sorted(found, key=len)
