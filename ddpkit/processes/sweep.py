"""Ends every process of a job that outlived its torchrun agent."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from ddpkit.runfolder import wire

SWEEP_GRACE_S = 2.5
# It holds the shared memory of loaders under the "file_system" strategy. Seconds after the last process of the job it
# removes the files and ends, so it must not be killed before.
ENDS_BY_ITSELF = "torch_shm_manager"


def sweep(folder: Path, at_once: bool = False) -> None:
    """End every process of this agent's part of the job in `folder` that outlived it: SIGTERM, then SIGKILL.

    `at_once`: SIGKILL; but the keepers, which end by themselves, first write down how their ranks ended.
    """
    found = _marked(folder)
    if not found:
        return
    swept = {pid: {"pid": pid, "command": command, "signal": "SIGTERM"} for pid, command in found.items()}
    if at_once:
        children = {pid: command for pid, command in found.items() if wire.KEEPER_FILE not in command}
        _signal_all(children, signal.SIGKILL)
    else:
        _signal_all(found, signal.SIGTERM)
    until = time.monotonic() + SWEEP_GRACE_S
    while (found := _marked(folder)) and time.monotonic() < until:
        time.sleep(0.02)
    while found:
        swept.update({pid: {"pid": pid, "command": command, "signal": "SIGKILL"} for pid, command in found.items()})
        _signal_all(found, signal.SIGKILL)
        time.sleep(0.02)
        found = _marked(folder)
    kept_in = wire.node_folder(folder, os.environ.get(wire.ENV_NODE, "")) / wire.AGENT_RECORD
    record = wire.read_record(kept_in) or {}
    wire.write_record(kept_in, {**record, "swept": list(swept.values())})


def _signal_all(pids: dict[int, str], which: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, which)
        except (ProcessLookupError, PermissionError):
            pass


def _marked(folder: Path) -> dict[int, str]:
    """The other processes whose environment has the marks of this job and this agent: pid to command."""
    marks = {f"{wire.ENV_RUN}={folder}".encode()}
    if node := os.environ.get(wire.ENV_NODE):
        marks.add(f"{wire.ENV_NODE}={node}".encode())
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as environ:
                if not marks <= set(environ.read().split(b"\0")):
                    continue
            with open(f"/proc/{entry}/cmdline", "rb") as cmdline:
                command = cmdline.read().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if command != ENDS_BY_ITSELF:
            found[int(entry)] = command
    return found
