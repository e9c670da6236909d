"""Asks the kernel whether it killed a process for memory.

The kernel's log says so, or the count of the process's cgroup. The process itself only gets a SIGKILL, as from
`kill -9`. Standard library only, because the keeper of each rank imports it.
"""

from __future__ import annotations

import os
import re
import time

CGROUPS = "/sys/fs/cgroup"
LOG = "/dev/kmsg"


class OomWatch:
    """Watches one process's memory cgroup, which may change, for kills by the kernel."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        # The log counts from boot, roughly as this clock does. Older lines may be about an earlier process of this pid.
        self._since_us = (time.monotonic() - 2) * 1e6
        self._counter = ""
        self._before = 0
        self.follow()

    def follow(self) -> None:
        """Look up the cgroup of the process; called regularly while it lives."""
        counter = _counter_of(self._pid)
        if counter and counter != self._counter:
            self._counter, self._before = counter, _kills(counter)

    def word(self) -> str:
        """How the kernel killed the process, in one line; "" if it did not, or does not tell."""
        if said := _log_on(self._pid, self._since_us):
            return f"the kernel's log says: {said}"
        if self._counter and _kills(self._counter) > self._before:
            return "the out-of-memory count of its cgroup went up as it died"
        return ""


def _counter_of(pid: int) -> str:
    """The file that counts the kernel's kills in the cgroup of `pid`; "" if there is none."""
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
    """The line of the kernel's log about the kill of `pid`; "" if none can be read."""
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
