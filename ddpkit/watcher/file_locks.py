"""Which process holds the lock on a file for which another one waits."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# proc(5): `2: FLOCK ADVISORY WRITE 2001 08:01:7864554 0 EOF`, and below it with an arrow who waits for that lock.
_LOCK = re.compile(r"\d+:(?P<waits> +->)? +\w+ +\w+ +\w+ +(?P<pid>-?\d+) (?P<file>\S+)")


def locked_by(threads: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[int, int]:
    """By process the one that holds the lock on a file for which it waits, as the kernel has them; for those whose `threads`
    py-spy has read, of a lock of the filelock library's too, which asks for it again and again."""
    waits, holders, holder = dict[int, int](), dict[str, int](), 0
    for lock in filter(None, map(_LOCK.match, _locks_of_the_kernel())):
        if lock["waits"]:
            waits[int(lock["pid"])] = holder
        else:
            holder = holders[lock["file"]] = int(lock["pid"])
    for pid, own in threads.items():
        if (file := _asked_by_filelock(own)) in holders:
            waits[pid] = holders[file]
    return {pid: holder for pid, holder in waits.items() if holder > 0 and holder != pid}


def _locks_of_the_kernel() -> list[str]:
    with contextlib.suppress(OSError):
        return Path("/proc/locks").read_text(encoding="ascii").splitlines()
    return []


def _asked_by_filelock(threads: Sequence[Mapping[str, Any]]) -> str:
    """The file, as the kernel numbers it, whose lock is being acquired in one of these threads; "" where none is."""
    frames = (frame for thread in threads for frame in thread["frames"])
    inside = (frame for frame in frames if "filelock" in Path(frame["filename"]).parts)
    for local in (local for frame in inside for local in frame["locals"] or ()):
        if local["name"] == "lock_filename":
            with contextlib.suppress(OSError):
                found = os.stat(str(local["repr"]).strip("\"'"))
                return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    return ""
