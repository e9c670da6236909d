"""Asks the kernel whether it killed a process for want of memory: by its cgroup's count, else by the kernel's own log.

A process that the kernel kills for its memory gets SIGKILL and no word. Nobody else can tell it from `kill -9`. Standard
library only: the keeper over each rank asks.
"""

from __future__ import annotations

import os
import re
import time

CGROUPS = "/sys/fs/cgroup"
LOG = "/dev/kmsg"


class OomWatch:
    """Follows the memory cgroup of one process, which it may change, and the kernel's kills in it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        # The log counts from boot, roughly as this clock does. A pid comes again; what was said of the last one is older.
        self._since_us = (time.monotonic() - 2) * 1e6
        self._counter = ""
        self._before = 0
        self.follow()

    def follow(self) -> None:
        """Look which cgroup the process is in; called now and then while it lives."""
        counter = _counter_of(self._pid)
        if counter and counter != self._counter:
            self._counter, self._before = counter, _kills(counter)

    def word(self) -> str:
        """What the kernel says of the death of the process, in one line; "" where it did not kill it, or does not tell."""
        if said := _log_on(self._pid, self._since_us):
            return f"the kernel's log says: {said}"
        if self._counter and _kills(self._counter) > self._before:
            return "the out-of-memory count of its cgroup went up as it died"
        return ""


def _counter_of(pid: int) -> str:
    """The file that counts the kernel's kills in the cgroup of `pid`: of version 2, or of version 1's memory controller."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return ""
    for _, controllers, path in lines:
        version_1 = "memory" in controllers.split(",")
        folder = f"{CGROUPS}/memory{path}" if version_1 else f"{CGROUPS}{path}"
        name = os.path.join(folder, "memory.oom_control" if version_1 else "memory.events")
        if (version_1 or not controllers) and os.path.exists(name):
            return name
    return ""


def _kills(counter: str) -> int:
    try:
        with open(counter, encoding="utf-8") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    except (OSError, ValueError):
        return 0


def _log_on(pid: int, since_us: float) -> str:
    """The line of the kernel's log that tells of the kill of `pid`; "" where there is none, or the log may not be read."""
    found = ""
    try:
        log = os.open(LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        while True:
            entry = os.read(log, 8192).decode("utf-8", "replace")
            match = re.match(rf"\d+,\d+,(\d+),[^;]*;(.*\bKilled process {pid} \([^)]*\))", entry)
            if match and int(match[1]) >= since_us:
                found = match[2]
    except BlockingIOError:
        return found
    except OSError:
        # An entry was overwritten while it was read.
        return found
    finally:
        os.close(log)
