"""The door of ddpkit: what a notebook uses, imported when first asked for, so that `import ddpkit` costs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bench import FixBench
    from .catalog import explain
    from .errors import JobFailed, LaunchError, LogError
    from .examination import doctor
    from .exercise import hint, progress, reset, task
    from .grading import check
    from .launcher import launch
    from .logdiagnosis import diagnose
    from .recordings import on_gpu
    from .run import Run

__all__ = [
    "FixBench",
    "JobFailed",
    "LaunchError",
    "LogError",
    "Run",
    "check",
    "diagnose",
    "doctor",
    "explain",
    "hint",
    "launch",
    "on_gpu",
    "progress",
    "reset",
    "task",
]
__version__ = "0.1.0"

_HOMES = {
    "FixBench": "bench",
    "launch": "launcher",
    "Run": "run",
    "diagnose": "logdiagnosis",
    "doctor": "examination",
    "on_gpu": "recordings",
    "explain": "catalog",
    "JobFailed": "errors",
    "LaunchError": "errors",
    "LogError": "errors",
    "check": "grading",
    "hint": "exercise",
    "progress": "exercise",
    "reset": "exercise",
    "task": "exercise",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ddpkit' has no attribute {name!r}; it offers {', '.join(__all__)}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext ddpkit`: brings the cell magic `%%torchrun`."""
    from .magic import load_ipython_extension as load

    load(shell)
