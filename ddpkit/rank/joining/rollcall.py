"""The roll call before a process group comes up: each rank puts its facts into the store and reads the others'.

What is wrong between ranks is seen here, by all of them and in one sentence, before anybody waits in a collective. From
the same facts `backends.py` then decides, with the same result on every rank. The store may outlive a restart of the
ranks (torchrun's does) and then holds what ranks that are gone have said. So the roll is complete only when every rank
has read the same facts, and what they go on with stands under a name made of these: no key of an earlier attempt is met.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from .store import PATIENCE_S

if TYPE_CHECKING:
    import torch.distributed as dist

# A rank that waits asks again after a tenth of the time that it has waited, within these bounds.
SOONEST_S, LATEST_S = 0.0002, 0.2
# Ranks of one start do not start at quite the same time; those of the next attempt come later than this.
ONE_START_S = 0.1
# How long whoever hosts the store keeps it up, after a failure, for the others to read of it.
LINGER_S = 3.0

T = TypeVar("T")

_LOG = logging.getLogger("ddpkit.rank")


@dataclass(frozen=True)
class Facts:
    """What a rank says of itself. `backend` is what it was asked for, if anything; `no_nccl` why it cannot use NCCL, ""
    where it can; `gpu` is the name of its GPU in the whole world, "" where it has none or that is not known."""

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
    """One roll call over `store`, whose keys only this setup uses. `started_at`: when this process started, in the time of
    the wall clock; what was said before that is of an attempt before."""

    def __init__(self, store: dist.Store, own: Facts, timeout_s: float, started_at: float) -> None:
        self._store, self._own, self._timeout_s = store, own, timeout_s
        self._since = started_at - ONE_START_S
        self._text = json.dumps({"at": time.time(), **asdict(own)}).encode()
        self._by, self._read = f"{own.pid} on {own.host}", ""

    def meet(self) -> tuple[tuple[Facts, ...], str]:
        """Say the own facts, and wait until every rank has read the same: the facts by rank, and a name for this meeting.

        Raises:
            ValueError: two processes are the same rank, or ranks were told different numbers of ranks.
            RuntimeError: a rank's setup has failed; its sentence is in the message.
            DistStoreError: a rank did not come within the timeout.
        """
        self._store.set(f"/rank//{self._own.rank}", self._text)
        self._store.set("/size", json.dumps({"at": time.time(), "rank": self._own.rank, "size": self._own.world_size}))
        return self._wait(self._met, self._absent)

    def exchange(self, name: str, text: str) -> list[str]:
        """The `text` of every rank, by rank; to be called once for a `name`, after the roll is complete.

        Raises:
            RuntimeError, DistStoreError: as `meet`.
        """
        keys = self._keys(f"{self._read}/{name}")
        self._store.set(keys[self._own.rank], text)
        return self._wait(
            lambda: [t.decode() for t in self._store.multi_get(keys)] if self._store.check(keys) else None,
            lambda: self._without(f"{self._read}/{name}"),
        )

    def tell_failure(self, error: BaseException) -> None:
        """Have the others know that this rank's setup has failed, and why."""
        if self.failed_elsewhere() is None:
            own = {"at": time.time(), "rank": self._own.rank, "by": self._by}
            self._store.set("/failed", json.dumps({**own, "said": f"{type(error).__name__}: {error}"}))
        self._store.set(f"/heeded//{self._own.rank}", self._by)

    def linger(self) -> None:
        """Wait a moment until all know of the failure, those too that come only now: the store goes with this process."""
        until = time.monotonic() + LINGER_S
        while time.monotonic() < until and not self._store.check(self._keys("heeded")):
            time.sleep(0.005)

    def failed_elsewhere(self) -> dict[str, Any] | None:
        """What another process has told of its failure, if one has."""
        if not self._store.check(["/failed"]):
            return None
        told = json.loads(self._store.get("/failed"))
        return told if self._is_of_now(told) and told["by"] != self._by else None

    def raise_if_failed_elsewhere(self, cause: BaseException | None = None) -> None:
        """Raise what another rank has told of its failure, from `cause` where this rank has met one that is its consequence."""
        try:
            told = self.failed_elsewhere()
        except RuntimeError:
            if cause is None:
                raise
            # The store is gone too: then the cause must do.
            return
        if told:
            raise RuntimeError(f"setup: rank {told['rank']} failed in its setup: {told['said']}") from cause

    def _keys(self, kind: str) -> list[str]:
        return [f"/{kind}//{r}" for r in range(self._own.world_size)]

    def _is_of_now(self, told: dict[str, Any]) -> bool:
        return bool(told["at"] >= self._since)

    def _met(self) -> tuple[tuple[Facts, ...], str] | None:
        """What the roll came to, once every rank has read the same facts."""
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
        return tuple(_facts(json.loads(text)) for text in said), read

    def _compare(self) -> None:
        """Raise where another process is this rank too, or was told another number of ranks: the roll would never be
        complete."""
        own = self._own
        if (text := self._store.get(f"/rank//{own.rank}")) != self._text:
            other = _facts(json.loads(text))
            raise ValueError(
                f"setup: two processes are rank {own.rank}: pid {own.pid} on {own.host} and pid {other.pid} on "
                f"{other.host}. Each needs a RANK of its own; torchrun gives it."
            )
        told = json.loads(self._store.get("/size"))
        if told["size"] != own.world_size and self._is_of_now(told):
            raise ValueError(
                f"setup: rank {own.rank} was told WORLD_SIZE={own.world_size}, rank {told['rank']} "
                f"WORLD_SIZE={told['size']}. All ranks need the same; torchrun sets it."
            )

    def _absent(self) -> list[int]:
        """Who is missing: has not come, or has last read the facts of an attempt before."""
        if missing := self._without("rank"):
            return missing
        marks = enumerate(self._keys("read"))
        return [r for r, mark in marks if self._text_of(mark) != self._read] if self._read else []

    def _without(self, kind: str) -> list[int]:
        return [r for r, key in enumerate(self._keys(kind)) if not self._store.check([key])]

    def _text_of(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _wait(self, found: Callable[[], T | None], absent: Callable[[], list[int]]) -> T:
        """What `found` returns as soon as that is something; whom it is that this waits for is said after a while."""
        import torch.distributed as dist

        began, said = time.monotonic(), False
        while (result := found()) is None:
            self.raise_if_failed_elsewhere()
            waited_s = time.monotonic() - began
            # Where nobody is absent any more, they have come just now.
            if waited_s > self._timeout_s and (missed := absent()):
                raise dist.DistStoreError(self._gave_up(missed))
            if waited_s > PATIENCE_S and not said and (missed := absent()):
                said = True
                _LOG.warning("setup: rank %d waits for %s of %d.", self._own.rank, _ranks(missed), self._own.world_size)
            time.sleep(min(LATEST_S, max(SOONEST_S, waited_s / 10)))
        return result

    def _gave_up(self, absent: list[int]) -> str:
        """Whom this rank has waited for in vain, with the words of torch's own store for it."""
        ms = round(self._timeout_s * 1000)
        return (
            f"setup: {_ranks(absent)} of {self._own.world_size} did not come within {self._timeout_s:g} s "
            f"(wait timeout after {ms}ms, keys: ddpkit//rank//{absent[0]}). It has ended, waits for "
            "something before its setup, or was never started: look at its stderr and its stack."
        )


def _ranks(numbers: list[int]) -> str:
    """`rank 3`, or `ranks 1, 2 and 3`; the first eight of many."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(map(str, numbers[:8]))
    return f"ranks {shown} and {len(numbers) - 8} more" if len(numbers) > 8 else f"ranks {shown}"


def _facts(told: dict[str, Any]) -> Facts:
    return Facts(**{name: told[name] for name in Facts.__dataclass_fields__})
