"""Tells which process holds the file lock that another process waits for."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# proc(5): `2: FLOCK ADVISORY WRITE 2001 08:01:7864554 0 EOF`; a line with an arrow below it is a process that waits for it.
_LOCK = re.compile(r"\d+:(?P<waits> +->)? +\w+ +\w+ +\w+ +(?P<pid>-?\d+) (?P<file>\S+)")


def locked_by(threads: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[int, int]:
    """The holder (pid) of the file lock that each process (pid) waits for.

    The kernel lists these waits. The filelock library polls instead: it is found in the `threads` that py-spy read.
    """
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
    """The file that filelock is locking in these threads, as /proc/locks names it; "" if none."""
    frames = (frame for thread in threads for frame in thread["frames"])
    inside = (frame for frame in frames if "filelock" in Path(frame["filename"]).parts)
    for local in (local for frame in inside for local in frame["locals"] or ()):
        if local["name"] == "lock_filename":
            with contextlib.suppress(OSError):
                found = os.stat(str(local["repr"]).strip("\"'"))
                return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    return ""
