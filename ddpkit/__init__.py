"""The public names of ddpkit. Each is imported on first use, so that `import ddpkit` is fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .course.answer import answer
    from .course.bench import FixBench
    from .course.exercises import hint, progress, reset, task
    from .course.grading import check
    from .course.lab import on_gpu
    from .diagnosis.log.conclusion import diagnose
    from .diagnosis.pages import explain
    from .errors import LaunchError, LogError
    from .launcher.launcher import launch
    from .launcher.slurm import SlurmOptions
    from .machine.examination import doctor
    from .run import Run

__all__ = [
    "FixBench",
    "JobFailed",
    "LaunchError",
    "LogError",
    "Run",
    "SlurmOptions",
    "answer",
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
    "FixBench": "course.bench",
    "launch": "launcher.launcher",
    "SlurmOptions": "launcher.slurm",
    "Run": "run",
    "diagnose": "diagnosis.log.conclusion",
    "doctor": "machine.examination",
    "on_gpu": "course.lab",
    "explain": "diagnosis.pages",
    "JobFailed": "run",
    "answer": "course.answer",
    "LaunchError": "errors",
    "LogError": "errors",
    "check": "course.grading",
    "hint": "course.exercises",
    "progress": "course.exercises",
    "reset": "course.exercises",
    "task": "course.exercises",
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
    """Register the cell magic `%%torchrun`; IPython calls this for `%load_ext ddpkit`."""
    from .launcher.magic import load_ipython_extension as load

    load(shell)
