"""What is known of ranks on other hosts, from what the watchers beside them write down (`beside.py`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpkit.runfolder import wire
from ddpkit.runfolder.ranks import Rank

from .progress import Memory, Progress

# Longer than NFS may show the old state of a file that changes (3 s).
LOST_AFTER_S = 5.0
LOOK_WITHIN_S = 12.0


class FarProgress(Progress):
    """Follows the ranks of one job on other hosts."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._beats: dict[str, tuple[int, float]] = {}
        self._pulses: dict[str, dict[str, Any]] = {}
        self._looks = (wire.read_record(folder / wire.LOOK_ASKED) or {}).get("number", 0)

    def update(self, ranks: Sequence[Rank]) -> None:
        self._note_ends(ranks)
        self._hear()
        now = time.monotonic()
        for rank in ranks:
            heard, told = self._of(rank.attempt, rank.rank), self._told(rank)
            if told:
                heard.at = max(heard.at, now - told["silent_s"])

    def _hear(self) -> None:
        for own in (self.folder / wire.NODES).glob("*"):
            pulse = wire.read_record(own / wire.PULSE) or {}
            if pulse and pulse["beats"] != self._beats.get(own.name, (0, 0.0))[0]:
                self._beats[own.name] = pulse["beats"], time.monotonic()
                self._pulses |= pulse["ranks"]

    def lost(self) -> list[str]:
        """The hosts that have given no sign of life for `LOST_AFTER_S`, although their agents have not ended."""
        now, found = time.monotonic(), []
        for node, (_beats, at) in sorted(self._beats.items()):
            if now - at > LOST_AFTER_S and not (wire.node_folder(self.folder, node) / wire.AGENT_RECORD).exists():
                found.append(node)
        return found

    def busy(self, rank: Rank) -> float:
        return float(self._told(rank).get("busy", 0.0))

    def children_busy(self, rank: Rank) -> float:
        return float(self._told(rank).get("children_busy", 0.0))

    def at_the_disk(self, rank: Rank) -> bool:
        return bool(self._told(rank).get("at_the_disk"))

    def doing(self, rank: Rank) -> str:
        spoken = self._of(rank.attempt, rank.rank).has_spoken
        return "running" if spoken else str(self._told(rank).get("doing", "running"))

    def memory(self, ranks: Sequence[Rank]) -> dict[int, Memory]:
        found = {}
        for rank in ranks:
            told = self._told(rank) if rank.exitcode is None else {}
            found[rank.rank] = Memory(*told.get("memory", ()))
        return found

    def look(self, ranks: Sequence[Rank], why: str) -> None:
        """Have every host look at its own ranks; returns when all that live have, or after `LOOK_WITHIN_S`."""
        self._looks += 1
        wire.write_record(self.folder / wire.LOOK_ASKED, {"number": self._looks, "why": why})
        waited_for = {rank.node for rank in ranks if rank.exitcode is None and rank.pid}
        until = time.monotonic() + LOOK_WITHIN_S
        while waited_for and time.monotonic() < until:
            time.sleep(0.05)
            self._hear()
            waited_for -= set(self.lost())
            for node in list(waited_for):
                own = wire.node_folder(self.folder, node)
                done = (wire.read_record(own / wire.LOOKED) or {}).get("number", 0) >= self._looks
                if done or (own / wire.AGENT_RECORD).exists():
                    waited_for.discard(node)

    def _told(self, rank: Rank) -> dict[str, Any]:
        """What was last written down of a rank."""
        return self._pulses.get(f"{rank.attempt}:{rank.rank}", {})
