"""Runs on each host of a job: starts torchrun there, and looks at the host's own ranks for the watcher far away.

Slurm starts a Python with the arguments RUN COMMAND..., which calls `main`. What it finds goes into the host's folder below
the run folder, which all hosts share; `far.py` reads it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.runfolder import wire

if TYPE_CHECKING:
    from ddpkit.runfolder.ranks import Rank

KEEPER = Path(__file__).parents[1] / "processes" / wire.KEEPER_FILE
EVERY_S = 0.25
# To ask a rank's children what they use costs more than all else: only after so long without progress.
QUIET_S = 2.0


class Beside:
    """Watches one host's part of the job in `folder`, until its agent has ended."""

    def __init__(self, folder: Path, node: str) -> None:
        self.folder, self.node = folder, node
        self.own = wire.node_folder(folder, node)
        self.own.mkdir(parents=True, exist_ok=True)
        self.beats = 1
        self.looked = 0

    def run(self, command: Sequence[str]) -> int:
        """Start the agent `command` under a keeper, watch its ranks; returns the keeper's exit code."""
        wire.write_record(self.own / wire.PULSE, {"beats": self.beats, "ranks": {}})
        # The mark by which the keeper finds what it has to end: this process does not have it.
        env = {**os.environ, wire.ENV_NODE: self.node, "PET_LOG_DIR": str(self.own / wire.LOGS)}
        keeping = [sys.executable, "-I", "-S", str(KEEPER), "agent", str(os.getpid()), *command]
        with open(self.own / wire.AGENT_LOG, "wb") as log:
            keeper = subprocess.Popen(keeping, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        # The agent does not wait for this import.
        from .progress import Progress

        self.progress = Progress()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return keeper.wait(EVERY_S)
            # A full disk or a slow file system must not end the watching.
            with contextlib.suppress(OSError):
                self._follow()

    def _follow(self) -> None:
        from ddpkit.runfolder.ranks import read_attempts

        attempts = read_attempts(self.folder)
        ranks = [rank for rank in (attempts[-1] if attempts else ()) if rank.node == self.node]
        self.progress.update(ranks)
        self._beat(ranks)
        asked = wire.read_record(self.folder / wire.LOOK_ASKED) or {}
        if asked.get("number", 0) > self.looked:
            self.looked = asked["number"]
            # It may take longer than this host may be silent.
            threading.Thread(target=self._look, args=(ranks, asked), name="ddpkit looks").start()

    def _look(self, ranks: Sequence[Rank], asked: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.progress.look(ranks, asked["why"])
            wire.write_record(self.own / wire.LOOKED, {"number": asked["number"]})

    def _beat(self, ranks: Sequence[Rank]) -> None:
        """Write down that this host lives, and how its ranks do."""
        self.beats += 1
        memory, found = self.progress.memory(ranks), {}
        for rank in ranks:
            if rank.exitcode is None and rank.pid:
                found[f"{rank.attempt}:{rank.rank}"] = self._of(rank) | {"memory": memory[rank.rank]}
        wire.write_record(self.own / wire.PULSE, {"beats": self.beats, "ranks": found})

    def _of(self, rank: Rank) -> dict[str, Any]:
        progress, silent_s = self.progress, self.progress.silent_s(rank)
        return {
            "silent_s": silent_s,
            "busy": progress.busy(rank),
            "children_busy": progress.children_busy(rank) if silent_s > QUIET_S else 0.0,
            "at_the_disk": progress.at_the_disk(rank),
            "doing": progress.doing(rank),
        }


def main() -> None:
    """The program of one host; Slurm's SIGTERM reaches the keeper by itself, and this goes on until the keeper has ended."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Not SIG_IGN, which the keeper and torchrun would inherit.
        signal.signal(number, lambda *_: None)
    folder = Path(sys.argv[1])
    beside = Beside(folder, os.environ["SLURMD_NODENAME"])
    sys.exit(beside.run(sys.argv[2:]) & 0xFF)
