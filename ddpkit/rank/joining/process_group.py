"""`setup`: brings the process group up with the right backend and device, and takes it down on every path.

`environment.py` reads the variables, the ranks meet in `store.py` and `rollcall.py`, and `backends.py` decides.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from ddpkit.recorder import collectives, failure
from ddpkit.runfolder import wire

from . import backends, environment
from . import store as stores
from .environment import Place
from .rollcall import Facts, RollCall

# gloo's threads ask for the GIL once more to let go of their last work. If the interpreter is shutting down then, the
# process aborts: 5 of 40 healthy DDP jobs without this pause, 0 of 40 with it.
GLOO_LETS_GO_S = 0.05
# How long to wait for the other ranks if no timeout is given: torch's default for gloo.
MEETING_S = 1800.0
# The steps of `setup`, and where to look when one fails.
STEPS = {
    "environment": "the environment",
    "store": "the network",
    "roll call": "what the ranks were told",
    "device": "the device",
    "init_process_group": "the network or NCCL",
}

_LOG = logging.getLogger("ddpkit.rank")
# Numbers the setups of this process; every rank counts alike.
_count = itertools.count(1)


@dataclass(frozen=True)
class Here:
    """The place of this process in the job. `rank` counts over all hosts, `local_rank` on this one.

    `store` is for what ranks tell each other outside of collectives: `store.set(key, text)`, `store.get(key)`. All ranks
    share it, and it holds no key of an attempt before a restart. It ends with the `with` block.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    backend: str
    device: torch.device
    store: dist.Store = field(compare=False, repr=False)


class setup:
    """Context manager over the process group: `with setup() as here:`.

    The device, cuda:LOCAL_RANK or the CPU, is set before any collective; ranks that share GPUs
    (`launch(share_gpu=True)`) take them in turn. Without torchrun's environment the process is a job of one rank. Each
    step is logged to "ddpkit.rank", which prints nothing below a warning unless asked to (`log_to`).

    Args:
        backend: else $DDP_BACKEND (which `launch(backend=...)` sets), else NCCL if every rank of the job has a GPU of
            its own, otherwise gloo; the ranks agree on it through the store.
        timeout_s: seconds after which a collective fails, and a rank that waits here for the others; else
            $TORCH_DIST_TIMEOUT, else torch's default (gloo 30 minutes, NCCL 10).
        fallback: if NCCL is asked for and impossible, or does not come up on some rank, all ranks take gloo, with a
            warning. Every rank must ask for this.

    Raises:
        ValueError: the environment, an argument, or what the ranks were told does not fit; the message names it.
        DistNetworkError: the ranks' store cannot be reached.
        DistStoreError: a rank did not come within the timeout; the message names it.
        RuntimeError: a process group is up already, the setup of another rank has failed, or torch's own has.
    """

    def __init__(self, backend: str | None = None, timeout_s: float | None = None, fallback: bool = False) -> None:
        self._asked = backend or os.environ.get(wire.ENV_BACKEND) or None
        self._timeout_s, self._fallback = timeout_s, fallback
        self._step = "environment"
        self._roll: RollCall | None = None
        self._hosts = False

    def __enter__(self) -> Here:
        try:
            return self._bring_up()
        except BaseException as error:
            # First: the failures of the other ranks are consequences of this one.
            failure.note(error)
            self._say_failure(error)
            self._tell_others(error)
            if self._step == "init_process_group":
                with contextlib.suppress(Exception):
                    _take_down()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            # Before the sockets close: the failures of the other ranks a moment later are consequences of this one.
            failure.note(error)
        self._roll = None
        if dist.is_initialized():
            _take_down()

    def _bring_up(self) -> Here:
        place = environment.place()
        collectives.say_joining({})
        self._timeout_s = environment.timeout_s(self._timeout_s)
        _say_where(place)
        if dist.is_initialized():
            raise RuntimeError(
                "setup: a process group is up already in this process. Leave the `with setup()` that made it, or call "
                "destroy_process_group(), before the next."
            )
        store, roll, name = self._rendezvous(place)
        choice = _decided(place, roll)
        self._step = "device"
        device = _device(choice.backend, place)
        self._step = "init_process_group"
        backend = self._init(choice.backend, place, device, dist.PrefixStore(f"{name}/group", store), roll)
        device = device if backend == choice.backend else _device(backend, place)
        local_world_size = place.local_world_size or sum(facts.host == roll[place.rank].host for facts in roll)
        _LOG.info("rank %d of %d is up: %s on %s", place.rank, place.world_size, backend, device)
        users = dist.PrefixStore(f"{name}/user", store)
        return Here(place.rank, place.local_rank, place.world_size, local_world_size, backend, device, users)

    def _rendezvous(self, place: Place) -> tuple[dist.Store, tuple[Facts, ...], str]:
        """Meet the other ranks: the store, all ranks' facts, and a prefix for keys that nobody has used."""
        self._step = "store"
        timeout_s = self._timeout_s or MEETING_S
        store = dist.PrefixStore(f"ddpkit/{next(_count)}", stores.open_store(place, timeout_s))
        self._step = "roll call"
        facts = backends.own_facts(place, self._asked, self._fallback)
        if place.alone:
            backends.check_asked(self._asked)
            return store, (facts,), "alone"
        _LOG.info("store: %s:%d has answered", place.host, place.port)
        self._roll, self._hosts = RollCall(store, facts, timeout_s, environment.started_at()), stores.hosts(place)
        backends.check_asked(self._asked)
        roll, name = self._roll.meet()
        hosts = len({each.host for each in roll})
        _LOG.info("roll call: %d ranks on %d host%s", len(roll), hosts, "s" if hosts > 1 else "")
        return store, roll, name

    def _init(
        self, backend: str, place: Place, device: torch.device, store: dist.Store, roll: tuple[Facts, ...]
    ) -> str:
        """Bring the group up, with gloo if `backend` does not come up and all ranks may fall back; return its backend.

        No rank goes on before all are up: gloo's last handshakes fail if a peer has ended its program already.
        """
        said = ""
        try:
            self._start(backend, place, device, dist.PrefixStore(backend, store))
        except Exception as error:
            if backend == "gloo" or not all(facts.fallback for facts in roll):
                if self._roll is not None:
                    self._roll.raise_if_failed_elsewhere(error)
                raise
            said = f"{type(error).__name__}: {error}".splitlines()[0]
        outcomes = [said] if self._roll is None else self._roll.exchange("outcome", said)
        if not any(outcomes):
            return backend
        rank = next(rank for rank, outcome in enumerate(outcomes) if outcome)
        _take_down()
        why = f"{backend} did not come up on rank {rank} ({outcomes[rank]})"
        _LOG.warning("setup: fell back to gloo: %s; %s.", why, backends.SLOW)
        self._start("gloo", place, device, dist.PrefixStore("fallback", store))
        return "gloo"

    def _start(self, backend: str, place: Place, device: torch.device, store: dist.Store) -> None:
        """torch's own `init_process_group`."""
        began = time.monotonic()
        lasts = "torch's own" if self._timeout_s is None else f"{self._timeout_s:g} s"
        _LOG.info("init_process_group: %s, %d ranks, timeout %s", backend, place.world_size, lasts)
        dist.init_process_group(
            backend,
            timeout=None if self._timeout_s is None else timedelta(seconds=self._timeout_s),
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            device_id=device if backend == "nccl" else None,
        )
        _LOG.info("init_process_group: done in %.3f s", time.monotonic() - began)

    def _say_failure(self, error: BaseException) -> None:
        _LOG.error(
            "setup failed at its step %r, which is a matter of %s. %s: %s Variables of NCCL, gloo and CUDA: %s",
            *(self._step, STEPS[self._step], type(error).__name__, error, environment.settings()),
        )

    def _tell_others(self, error: BaseException) -> None:
        """Tell the ranks that wait for this one; if this process hosts the store, stay until they know."""
        with contextlib.suppress(Exception):
            if self._roll is not None:
                self._roll.tell_failure(error)
                if self._hosts:
                    self._roll.linger()


def _take_down() -> None:
    if dist.is_initialized():
        backend = dist.get_backend()
        dist.destroy_process_group()
        if backend == "gloo":
            time.sleep(GLOO_LETS_GO_S)
    else:
        # torch numbers its groups, and the number is part of the keys under which ranks find each other. A group that did
        # not come up keeps its number; after one that came up and was destroyed, torch counts from 0 again.
        dist.distributed_c10d._world.group_count = 0


def _decided(place: Place, roll: tuple[Facts, ...]) -> backends.Choice:
    choice = backends.decide(roll)
    for each in backends.differences(roll) if place.rank == 0 else ():
        _LOG.warning("%s", each)
    if choice.fell_back:
        _LOG.warning("setup: fell back to gloo: %s; %s.", choice.fell_back, backends.SLOW)
    else:
        _LOG.info("backend: %s (%s)", choice.backend, choice.why)
    return choice


def _device(backend: str, place: Place) -> torch.device:
    """This rank's device. It is set before any collective: else NCCL would take the first GPU on every rank."""
    device = torch.device("cuda", place.local_rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl" and environment.shares_gpu():
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        # NCCL reads it at the first communicator. It refuses two ranks of one host on the same GPU, but not of two hosts.
        os.environ.setdefault("NCCL_HOSTID", f"rank{place.rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _LOG.info("device: %s", device)
    return device


def _say_where(place: Place) -> None:
    if _LOG.isEnabledFor(logging.INFO):
        _LOG.info("environment: %s", environment.described(place))
        _LOG.info("versions: %s", environment.versions())
        _LOG.info("devices: %s", environment.devices())
