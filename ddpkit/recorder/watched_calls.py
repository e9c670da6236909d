"""Wraps the calls of torch.distributed that a rank makes, to record them.

torch is not imported here: its modules are wrapped when the script imports them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

from ddpkit.runfolder import wire

from . import collectives, failure, messages, replicas, store_keys

_WATCHED = "torch.distributed.distributed_c10d"
_IN_C = "torch._C._distributed_c10d"
_FROM_ONE_OR_TO_ONE = ("broadcast", "scatter", "reduce", "gather")
# Once every rank has joined one of these, all go on.
_FOR_ALL = ("barrier", "monitored_barrier", "all_reduce", "all_gather", "all_gather_into_tensor")


def arm() -> None:
    """Wrap torch.distributed when it is imported; a warm rank's zygote has done this already."""
    if _WATCHED not in sys.modules:
        meet(_WATCHED, _watch)
        meet("torch.nn.parallel.distributed", replicas.follow_models)


def meet(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` with module `name` when it is imported, or now if it has been."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Meeting(name, then))


def _watch(module: ModuleType) -> None:
    calls = {"init_process_group": _joining, "destroy_process_group": _leaving}
    calls |= dict.fromkeys(("send", "recv", "isend", "irecv"), _exchanging)
    calls |= dict.fromkeys((*_FROM_ONE_OR_TO_ONE, *_FOR_ALL, *messages.OF_OBJECTS), _calling)
    for name, watched in calls.items():
        module.__dict__[name] = watched(module.__dict__[name])
    module.__dict__["new_group"] = _grouping(module.__dict__["new_group"])
    tcp_store = sys.modules[_IN_C].__dict__["TCPStore"]
    tcp_store.__init__ = _meeting_at(tcp_store.__init__)
    for name in store_keys.WATCHED:
        setattr(module.Store, name, store_keys.watched(getattr(module.Store, name)))


class _Meeting(MetaPathFinder):
    """Finds one module as usual; its loader calls `then` after the module has run."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _MeetingLoader(spec.loader, self._then)
        return spec


class _MeetingLoader(Loader):
    def __init__(self, real: Any, then: Callable[[ModuleType], None]) -> None:
        self._real, self._then = real, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        self._then(module)


def _joining(init: Callable[..., Any]) -> Callable[..., Any]:
    """`init`, which records how this rank joins, and then lets it answer the watcher."""

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(TypeError):
            collectives.say_joining(inspect.signature(init).bind_partial(*args, **kwargs).arguments)
        done = init(*args, **kwargs)
        collectives.listen()
        return done

    return init_process_group


def _meeting_at(init: Callable[..., None]) -> Callable[..., None]:
    """`TCPStore.__init__`, which records the store's address if the user's code makes it."""

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if failure.is_users_own(sys._getframe(1).f_code.co_filename):
            asked = {**dict(zip(("host_name", "port"), args, strict=False)), **kwargs}
            failure.record(wire.STORE, {"address": f"{asked.get('host_name', '')}:{asked.get('port', '')}"})
        init(self, *args, **kwargs)

    return __init__


def _exchanging(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """`exchange`, a send or receive, which records itself and its peer."""
    signature = inspect.signature(exchange)

    @functools.wraps(exchange)
    def counted(*args: Any, **kwargs: Any) -> Any:
        # `recv` calls `irecv`.
        outer, record = messages.under_way_with, None
        with contextlib.suppress(TypeError):
            record = messages.begin_exchange(exchange.__name__, signature.bind_partial(*args, **kwargs).arguments)
        given = exchange(*args, **kwargs)
        messages.end_exchange(record, given, outer)
        return given

    return counted


def _calling(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, a collective, which records its root and number.

    It stamps an exception that is passing through, before the other ranks can go on and fail because of it.
    """
    op = call.__name__
    # Binding all arguments takes as long as a small broadcast.
    asked = [(place, name) for place, name in enumerate(inspect.signature(call).parameters) if name in messages.ASKED]

    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        in_flight = sys.exc_info()[1]
        failure.stamp(in_flight, lets_go=op in _FOR_ALL)
        given = {**kwargs, **{name: args[place] for place, name in asked if place < len(args)}}
        under_way = messages.begin_call(op, given)
        try:
            returned = call(*args, **kwargs)
        except BaseException as error:
            under_way.end(error)
            raise
        under_way.end()
        return returned

    return noted


def _grouping(make: Callable[..., Any]) -> Callable[..., Any]:
    """`new_group`, which records the ranks that it is given: every rank must name the same."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(TypeError):
            collectives.say_grouping(signature.bind_partial(*args, **kwargs).arguments)
        return make(*args, **kwargs)

    return new_group


def _leaving(destroy: Callable[..., Any]) -> Callable[..., Any]:
    """`destroy`, which first records the replicas and an exception: it closes this rank's sockets."""

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        in_flight = sys.exc_info()[1]
        if in_flight is not None:
            failure.note(in_flight)
        if (args or [kwargs.get("group")])[0] in (None, sys.modules[_WATCHED].GroupMember.WORLD):
            replicas.note()
        collectives.remember_groups()
        return destroy(*args, **kwargs)

    return destroy_process_group
