"""Writes down this rank's collectives, at its end or when the watcher asks.

torch's flight recorder keeps the last 2000 collectives of a rank with their Python lines. Only a thread of the rank can
read it, so one waits for questions on a named pipe in the rank's folder, from the first process group on.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ddpkit.runfolder import wire

from . import failure, messages, store_keys

# Only the last entries keep their frames, which take ten times the room of the rest and of which only the last are read.
MOST_PLACES = 64

# Reentrant: a signal handler may end the rank while it writes them down.
_lock = threading.RLock()
_listening_pid = 0
_members: dict[str, list[int]] = {}
_groups_asked: list[list[int]] = []
# The collective that was under way at the watcher's last question, as group and number, and its name once it is read.
_under_way: tuple[str, int] | None = None
_its_name = ""


def say_joining(asked: Mapping[str, Any]) -> None:
    """Record how this rank joins its process group; `asked` are `init_process_group`'s arguments.

    The script may have changed the environment by now, which cannot be seen from outside.
    """
    env, by = os.environ, asked.get("init_method") or "env://"
    record = {
        "at_ns": time.time_ns(),
        "where": failure.called_from(),
        "master": f"{env.get('MASTER_ADDR', '')}:{env.get('MASTER_PORT', '')}"
        if by == "env://"
        else _without_scheme(by),
        "rank": asked["rank"] if asked.get("rank", -1) >= 0 else int(env.get("RANK", "-1")),
        "world_size": asked["world_size"] if asked.get("world_size", -1) > 0 else int(env.get("WORLD_SIZE", "-1")),
    }
    failure.record(wire.JOINING, record)


def say_grouping(asked: Mapping[str, Any]) -> None:
    """Keep the ranks that this one names for a new group; `asked` are `new_group`'s arguments."""
    if not asked.get("use_local_synchronization"):
        with contextlib.suppress(Exception):
            _groups_asked.append(sorted(map(int, asked.get("ranks") or ())))


def _without_scheme(init_method: str) -> str:
    """`host:port` of `tcp://host:port?rank=0`; any other text unchanged."""
    return init_method.removeprefix("tcp://").partition("?")[0] if init_method.startswith("tcp://") else init_method


def listen() -> None:
    """Begin to answer the watcher, once a process group is up; nothing outside a ddpkit job."""
    global _listening_pid
    folder = failure.own_folder()
    if folder is None or _listening_pid == os.getpid():
        return
    _listening_pid = os.getpid()
    with contextlib.suppress(OSError):
        path = folder / wire.ASK
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        # Also open for writing, so that reading never meets the pipe's end.
        asked = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        threading.Thread(target=_answer, args=(asked,), name="ddpkit answers its watcher", daemon=True).start()


def _answer(asked: int) -> None:
    while True:
        questions = os.read(asked, 64)
        with contextlib.suppress(Exception):
            if wire.ASK_ENTRIES in questions:
                note(wire.COLLECTIVES_ASKED)
            else:
                note(wire.PROGRESS, with_entries=False)


def note(name: str = wire.COLLECTIVES, with_entries: bool = True) -> None:
    """Write this rank's collectives into its folder; nothing if it had no process group."""
    folder = failure.own_folder()
    if folder is None or _listening_pid != os.getpid():
        return
    with _lock:
        remember_groups()
        found = recorded(with_entries)
        if not with_entries:
            found["under_way"] = _name_of_what_stays_under_way(found["enqueued"], found["completed"])
        with contextlib.suppress(OSError):
            wire.write_record(folder / name, {"at_ns": time.time_ns(), "exchanges": messages.exchanges, **found})


def recorded(with_entries: bool) -> dict[str, Any]:
    """The flight recorder as plain data; without one (older torch), only the default group's number.

    `enqueued` and `completed` are the numbers of the last collective by process group. `with_entries` adds what
    `runfolder/calls.py` reads: collectives, messages and calls of a store, oldest first, and what is under way.
    """
    dump = getattr(getattr(sys.modules.get("torch._C"), "_distributed_c10d", None), "_dump_fr_trace", None)
    if dump is None:
        return {"enqueued": _sequence_number(), "completed": {}, "entries": []}
    with _no_inductor():
        # Safe to unpickle: torch wrote it in this process.
        trace = pickle.loads(dump(with_entries, with_entries, False))
    status = trace.get("pg_status", {})
    found: dict[str, Any] = {
        "enqueued": {name: last["last_enqueued_collective"] for name, last in status.items()},
        "completed": {name: last["last_completed_collective"] for name, last in status.items()},
    }
    if with_entries:
        entries = sorted(trace.get("entries", []), key=lambda entry: entry["record_id"])
        without_place = len(entries) - MOST_PLACES
        found["requested"], found["groups"] = messages.requested(), list(_members.values())
        found["groups_asked"] = _groups_asked
        found["exchanged"], found["keyed"] = _placed(messages.exchanged), _placed(store_keys.called)
        found["set_beside"], found["awaited"] = _placed(store_keys.set_beside), list(store_keys.awaited)
        found["handling"] = failure.handled_by_main()
        calls_of = messages.calls()
        found["entries"] = [_entry(entry, i >= without_place, calls_of) for i, entry in enumerate(entries)]
    return found


def _name_of_what_stays_under_way(enqueued: Mapping[str, int], completed: Mapping[str, int]) -> str:
    """`all_reduce #3`, if this rank was in it at the last question, too; else "".

    The name is among the entries, which take 20 ms to read: only a rank that waits has that time, and once is enough.
    """
    global _under_way, _its_name
    before, _under_way = _under_way, None
    for group, number in enqueued.items():
        if number > completed.get(group, number):
            _under_way = group, number
    if _under_way is None or _under_way != before:
        _its_name = ""
    elif not _its_name:
        group, number = _under_way
        _its_name = f"collective #{number}"
        trace = pickle.loads(sys.modules["torch._C"]._distributed_c10d._dump_fr_trace(True, False, False))
        for entry in trace["entries"]:
            name, description = entry["process_group"]
            if (name, entry["collective_seq_id"], entry["is_p2p"]) == (group, number, False):
                of_group = "" if description in ("default_pg", "") else f" of group {group}"
                _its_name = f"{entry['profiling_name'].rpartition(':')[2]} #{number}{of_group}"
    return _its_name


@contextlib.contextmanager
def _no_inductor() -> Iterator[None]:
    """Keep torch from importing its compiler (0.8 s) to ask whether frames were compiled; none can be."""
    torch, nothing = sys.modules["torch"], object()
    if "torch._inductor" not in sys.modules:
        torch.__dict__["_inductor"] = nothing
    try:
        yield
    finally:
        if torch.__dict__.get("_inductor") is nothing:
            del torch.__dict__["_inductor"]


def _entry(
    entry: dict[str, Any], placed: bool, calls_of: Callable[[str, int], list[messages.Called]]
) -> dict[str, Any]:
    group, description = entry["process_group"]
    backend, _, op = entry["profiling_name"].rpartition(":")
    calls = calls_of(op, entry["time_created_ns"])
    call = calls[0] if calls else None
    came_back = backend == "gloo" and call is not None and all(one.waited for one in calls)
    return {
        "seq": entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
        "op": op,
        "backend": backend,
        "p2p": entry["is_p2p"],
        "group": group,
        "group_name": description,
        "ranks": _members.get(group, []),
        "root": call.root if call else None,
        "brings": call.brings if call else None,
        "reduces": call.reduces if call else "",
        "over_ns": call.over_ns if call else 0,
        # Only one rank has the input of a scatter; all have its output.
        "sizes": entry["output_sizes" if op == "scatter" else "input_sizes"],
        "dtypes": entry["output_dtypes" if op == "scatter" else "input_dtypes"],
        "at_ns": entry["time_created_ns"],
        # gloo's entries stay "scheduled", and are retired just after their call has come back; NCCL's say "completed"
        # before they are retired.
        "done": entry["retired"] or entry["state"] == "completed" or came_back,
        "where": _place(entry["frames"]) if placed else None,
        "path": _path(entry["frames"]) if placed else [],
    }


def _placed(calls: Iterable[tuple[dict[str, Any], dict[str, Any] | None]]) -> list[dict[str, Any]]:
    return [{**call, "where": _place([line] if line else [])} for call, line in list(calls)]


def _path(frames: list[dict[str, Any]]) -> list[str]:
    """The user's lines on the way to a collective as `file:line`, innermost first."""
    return [f"{each['filename']}:{each['line']}" for each in frames if failure.is_users_own(each["filename"])]


def _place(frames: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The innermost of `frames` in the user's code, as a record."""
    for frame in frames:
        file, line = frame["filename"], frame["line"]
        if failure.is_users_own(file):
            source = linecache.getline(file, line).strip()
            return {"file": file, "line": line, "function": frame["name"], "source": source, "own": True}
    return None


def remember_groups() -> None:
    """Keep each process group's global ranks, which the flight recorder does not have for gloo."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    with contextlib.suppress(Exception):
        for group, ranks in c10d._world.pg_group_ranks.items():
            # A group without this rank is a plain number in this list.
            if name := getattr(group, "group_name", ""):
                _members[name] = sorted(ranks)


def _sequence_number() -> dict[str, int]:
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    with contextlib.suppress(Exception):
        return {"0": c10d._get_default_group()._get_sequence_number_for_group()}
    return {}
