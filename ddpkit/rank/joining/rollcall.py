"""The roll call before a process group comes up: each rank puts its facts into the store and reads the others'.

What is wrong between ranks shows here, to all of them and in one sentence, before anybody waits in a collective.

torchrun's store outlives a restart of the ranks, and then holds keys of ranks that are gone. So the roll is complete
only when every rank has read the same facts. All later keys have a prefix made of these facts, which no earlier attempt
has used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from .store import PATIENCE_S
from .words import in_words

# A waiting rank asks again after a tenth of the time it has waited, within these bounds.
SOONEST_S, LATEST_S = 0.0002, 0.2
# The ranks of one start begin within this time; those of the next attempt come later.
ONE_START_S = 0.1
# How long the host of the store keeps it up after a failure, for the others to read of it.
LINGER_S = 3.0

T = TypeVar("T")

_LOG = logging.getLogger("ddpkit.rank")


@dataclass(frozen=True)
class Facts:
    """What a rank says of itself. `backend` is the one it was asked for; `no_nccl` is why it cannot use NCCL, "" if it can;
    `gpu` is a name that no other GPU has, "" if the rank has none or torch does not tell."""

    rank: int
    world_size: int
    host: str
    pid: int
    backend: str | None
    fallback: bool
    no_nccl: str
    gpu: str
    torch: str
    nccl: str


class RollCall:
    """One roll call over `store`, whose keys only this setup uses. What was said before this process started (at
    `started_at`, in seconds of the wall clock) belongs to an earlier attempt."""

    def __init__(self, store: dist.Store, own: Facts, timeout_s: float, started_at: float) -> None:
        self._store, self._own, self._timeout_s = store, own, timeout_s
        self._since = started_at - ONE_START_S
        self._text = json.dumps({"at": time.time(), "facts": asdict(own)}).encode()
        self._by, self._read = f"{own.pid} on {own.host}", ""

    def meet(self) -> tuple[tuple[Facts, ...], str]:
        """Say the own facts, and wait until every rank has read the same: the facts by rank, and a name for this meeting."""
        self._store.set(f"/rank//{self._own.rank}", self._text)
        self._store.set("/size", json.dumps({"at": time.time(), "rank": self._own.rank, "size": self._own.world_size}))
        return self._wait(self._met, self._absent)

    def exchange(self, name: str, text: str) -> list[str]:
        """The `text` of every rank, by rank. Call it once per `name`, after `meet`."""
        keys = self._keys(f"{self._read}/{name}")
        self._store.set(keys[self._own.rank], text)
        return self._wait(
            lambda: [t.decode() for t in self._store.multi_get(keys)] if self._store.check(keys) else None,
            lambda: self._without(f"{self._read}/{name}"),
        )

    def tell_failure(self, error: BaseException) -> None:
        """Tell the others that this rank's setup has failed, and why."""
        if self._failed_elsewhere() is None:
            own = {"at": time.time(), "rank": self._own.rank, "by": self._by}
            self._store.set("/failed", json.dumps({**own, "said": f"{type(error).__name__}: {error}"}))
        self._store.set(f"/heeded//{self._own.rank}", self._by)

    def linger(self) -> None:
        """Wait a moment until all ranks know of the failure, late ones too: the store ends with this process."""
        until = time.monotonic() + LINGER_S
        while time.monotonic() < until and not self._store.check(self._keys("heeded")):
            time.sleep(0.005)

    def raise_if_failed_elsewhere(self, cause: BaseException | None = None) -> None:
        """Raise the failure that another rank has told of, from `cause`: this rank's own, which follows from it."""
        try:
            told = self._failed_elsewhere()
        except RuntimeError:
            if cause is None:
                raise
            # The store is gone too: the caller raises `cause`.
            return
        if told:
            raise RuntimeError(f"setup: rank {told['rank']} failed in its setup: {told['said']}") from cause

    def _failed_elsewhere(self) -> dict[str, Any] | None:
        """The failure that another process has told of, if any."""
        if not self._store.check(["/failed"]):
            return None
        told = json.loads(self._store.get("/failed"))
        return told if told["at"] >= self._since and told["by"] != self._by else None

    def _keys(self, kind: str) -> list[str]:
        return [f"/{kind}//{r}" for r in range(self._own.world_size)]

    def _met(self) -> tuple[tuple[Facts, ...], str] | None:
        """The result of the roll call, once every rank has read the same facts."""
        self._compare()
        if not self._store.check(self._keys("rank")):
            return None
        said = self._store.multi_get(self._keys("rank"))
        read = hashlib.sha256(b"\n".join(said)).hexdigest()[:12]
        if read != self._read:
            self._store.set(f"/read//{self._own.rank}", read)
            self._read = read
        marks = self._keys("read")
        if not self._store.check(marks) or any(mark.decode() != read for mark in self._store.multi_get(marks)):
            return None
        return tuple(_facts(text) for text in said), read

    def _compare(self) -> None:
        """Raise if another process is this rank too, or was told another number of ranks: the roll would never end."""
        own = self._own
        if (text := self._store.get(f"/rank//{own.rank}")) != self._text:
            other = _facts(text)
            raise ValueError(
                f"setup: two processes are rank {own.rank}: pid {own.pid} on {own.host} and pid {other.pid} on "
                f"{other.host}. Each needs a RANK of its own; torchrun gives it."
            )
        told = json.loads(self._store.get("/size"))
        if told["size"] != own.world_size and told["at"] >= self._since:
            raise ValueError(
                f"setup: rank {own.rank} was told WORLD_SIZE={own.world_size}, rank {told['rank']} "
                f"WORLD_SIZE={told['size']}. All ranks need the same; torchrun sets it."
            )

    def _absent(self) -> list[int]:
        """The ranks that have not come, or have last read the facts of an earlier attempt."""
        if missing := self._without("rank"):
            return missing
        marks = enumerate(self._keys("read"))
        return [r for r, mark in marks if self._text_of(mark) != self._read] if self._read else []

    def _without(self, kind: str) -> list[int]:
        return [r for r, key in enumerate(self._keys(kind)) if not self._store.check([key])]

    def _text_of(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _wait(self, found: Callable[[], T | None], absent: Callable[[], list[int]]) -> T:
        """The first result of `found` that is not None; warns after a while of the ranks that it waits for."""
        began, said = time.monotonic(), False
        while (result := found()) is None:
            self.raise_if_failed_elsewhere()
            waited_s = time.monotonic() - began
            # If nobody is absent any more, they have just come.
            if waited_s > self._timeout_s and (missed := absent()):
                raise dist.DistStoreError(self._gave_up(missed))
            if waited_s > PATIENCE_S and not said and (missed := absent()):
                said = True
                size = self._own.world_size
                _LOG.warning("setup: rank %d waits for %s of %d.", self._own.rank, in_words(missed), size)
            time.sleep(min(LATEST_S, max(SOONEST_S, waited_s / 10)))
        return result

    def _gave_up(self, absent: list[int]) -> str:
        """Which ranks did not come; the words in brackets are those of torch's own store."""
        ms = round(self._timeout_s * 1000)
        return (
            f"setup: {in_words(absent)} of {self._own.world_size} did not come within {self._timeout_s:g} s "
            f"(wait timeout after {ms}ms, keys: ddpkit//rank//{absent[0]}). It has ended, waits for "
            "something before its setup, or was never started: look at its stderr and its stack."
        )


def _facts(text: bytes) -> Facts:
    return Facts(**json.loads(text)["facts"])
