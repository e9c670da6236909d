"""Opens the store at which the ranks of a job meet, or says why it cannot; `rollcall.py` then uses it."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from .environment import Place

# Ranks of one start come within this time unless the machine is very busy, and a slow name server takes 5 s.
# Not longer: the missing rank should be named before somebody has to look.
PATIENCE_S = 6.0

_LOG = logging.getLogger("ddpkit.rank")


def open_store(here: Place, timeout_s: float) -> dist.Store:
    """The job's store: torchrun's; rank 0's own if nobody else hosts one; for a single process, one in its memory."""
    if here.alone:
        return dist.HashStore()
    _find_host(here, min(PATIENCE_S, timeout_s))
    impatient = threading.Timer(PATIENCE_S, _say_that_it_waits, (here,))
    impatient.start()
    try:
        store = dist.TCPStore(
            here.host,
            here.port,
            None,
            hosts(here),
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )
        # An older torch does not check by itself that a store answers.
        store.num_keys()
    except RuntimeError as error:
        _say_if_taken(here, error)
        raise dist.DistNetworkError(_why_not(here, timeout_s)) from error
    finally:
        impatient.cancel()
        impatient.join()
    return store


def hosts(here: Place) -> bool:
    """Whether this process hosts the job's store, which ends with it. torchrun's agent hosts it for its ranks."""
    return not here.alone and here.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _say_that_it_waits(here: Place) -> None:
    _LOG.warning("%s Rank %d goes on trying.", _why_not(here, PATIENCE_S), here.rank)


def _find_host(here: Place, patience_s: float) -> None:
    """Wait until the host's name has an address: that of a container may come later than the container."""
    until = time.monotonic() + patience_s
    while True:
        try:
            socket.getaddrinfo(here.host, here.port, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if time.monotonic() > until:
                raise dist.DistNetworkError(
                    f'setup: MASTER_ADDR="{here.host}" has no address on this host ({error.strerror}). It is where rank 0 '
                    f"runs; `getent hosts {here.host}` must find it, on every host."
                ) from error
        time.sleep(0.1)


def _say_if_taken(here: Place, error: RuntimeError) -> None:
    if "EADDRINUSE" in str(error) or "ddress already in use" in str(error):
        raise dist.DistNetworkError(
            f"setup: rank 0 is to host the store at port {here.port}, but the port is taken (address already in use). "
            f"`ss -ltnp | grep {here.port}` names the holder: end it, or take another MASTER_PORT. "
            "torchrun --standalone takes a free port by itself."
        ) from error


def _why_not(here: Place, waited_s: float) -> str:
    """The error of a rank that got no answer at the store's address for `waited_s` seconds."""
    where, owner = f"{here.host}:{here.port}", "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "rank 0"
    asked = (
        f"setup: rank {here.rank} asked for the job's store at {where} (MASTER_ADDR, MASTER_PORT) for {waited_s:g} s"
    )
    try:
        socket.create_connection((here.host, here.port), timeout=1.0).close()
    except OSError as error:
        found = f"nobody answered: {error.strerror or error}"
        do = f"See that {owner}, which hosts it, runs and was given the same address, and that no firewall is between."
    else:
        found = "what listens there did not answer as a store of torch's does"
        do = "If that is no rank of this job, take another MASTER_PORT, the same on all ranks."
    return f"{asked}, and {found}. {do}"
