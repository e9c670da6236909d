"""Looks on while torch.distributed is used in a rank, at the moments a process group is brought up and torn down.

torch is not imported from here: its module is met on the way in, if the script ever imports it.
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

from . import collectives, failure

_WATCHED = "torch.distributed.distributed_c10d"


def arm() -> None:
    """Have `init_process_group` and `destroy_process_group` watched.

    In a warm rank this was done before the zygote imported torch.
    """
    if _WATCHED not in sys.modules:
        sys.meta_path.insert(0, _Meeting())


class _Meeting(MetaPathFinder):
    """Finds the one watched module as the other finders would, with a loader that adds the watching after it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _WatchingLoader(spec.loader)
        return spec


class _WatchingLoader(Loader):
    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        for name, watched in (("init_process_group", _joining), ("destroy_process_group", _leaving)):
            module.__dict__[name] = watched(module.__dict__[name])


def _joining(init: Callable[..., Any]) -> Callable[..., Any]:
    """`init`, with a record of whom this rank tries to join, and the watcher's questions answered once it has."""

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(TypeError):
            collectives.say_joining(inspect.signature(init).bind_partial(*args, **kwargs).arguments)
        done = init(*args, **kwargs)
        collectives.listen()
        return done

    return init_process_group


def _leaving(destroy: Callable[..., Any]) -> Callable[..., Any]:
    """`destroy`, with the exception that is passing through stamped before it closes this rank's sockets."""

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        in_flight = sys.exc_info()[1]
        if in_flight is not None:
            failure.note(in_flight)
        collectives.remember_groups()
        return destroy(*args, **kwargs)

    return destroy_process_group
