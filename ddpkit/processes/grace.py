"""How long a process that was told to end may go on before it is killed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ddpkit.runfolder import wire

RANK_S = 2.0
AGENT_S = 4.0
# Before torchrun's own SIGKILL, which would end the keeper as well.
AHEAD_S = 0.5


def of_rank(folder: Path, told_ns: int) -> tuple[float, str]:
    """The seconds that a rank told to end at `told_ns` may go on, and what it does with the signal.

    One whose own SIGTERM handler has started, where it may save a checkpoint, gets torchrun's time. That is recorded, for
    the watcher and for the agent's keeper.
    """
    handler = wire.read_record(folder / wire.HANDLER)
    if handler is None or handler["at_ns"] < told_ns:
        return RANK_S, "ignored"
    grace = wire.read_record(folder / wire.GRACE)
    if grace is None:
        seconds = _torchruns_s(folder)
        grace = {
            "by": f" by `{handler['name']}`" if handler["name"] else "",
            "seconds": seconds,
            "until_ns": told_ns + int(seconds * 1e9),
        }
        with contextlib.suppress(OSError):
            wire.write_record(folder / wire.GRACE, grace)
    return grace["seconds"], "handled"


def _torchruns_s(folder: Path) -> float:
    """The seconds that torchrun waits; after the failure of another rank 30 at most, whatever it was asked for."""
    try:
        asked = float(os.environ.get(wire.ENV_SHUTDOWN, wire.SHUTDOWN_S))
    except ValueError:
        asked = wire.SHUTDOWN_S
    for path in folder.parent.glob(f"*/{wire.EXIT}"):
        ended = wire.read_record(path)
        if ended and ended["exitcode"] and not ended["told"]:
            asked = min(asked, wire.SHUTDOWN_S)
    return max(0.0, asked - AHEAD_S)


def of_agent(folder: Path, told_ns: int) -> tuple[float, str]:
    """The seconds that the agent of the job in `folder` may go on: after the last rank has had its time."""
    latest_ns = told_ns
    for path in folder.glob(f"ranks/*/*/{wire.GRACE}"):
        latest_ns = max(latest_ns, (wire.read_record(path) or {}).get("until_ns", 0))
    return AGENT_S + (latest_ns - told_ns) / 1e9, "ignored"
