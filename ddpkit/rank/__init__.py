"""What a training script may use inside a rank, from `setup` to a whole `Trainer`. What is not named here works without being
called."""

# ruff: noqa: F401 - the imports for types are there for editors; at run time `__getattr__` makes them.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpkit.settings.training import ConfigError, TrainConfig, validate_config

    from .comm.profiler import CommProfiler
    from .guarding.deadline import Deadline
    from .guarding.guard import all_finite, check_replicas, check_steps, unused_parameters
    from .joining.process_group import Here, setup
    from .loading.loader import SafeLoader, UnevenData, WorkerDied, WorkerTimedOut, safe_loader
    from .logs import log_to
    from .memory.budget import Budget, is_out_of_memory, memory_budget
    from .memory.monitor import MemoryMonitor
    from .memory.smaller_host import host_memory
    from .reports import report
    from .saving.checkpoint import Checkpoints
    from .saving.weights import load_weights
    from .trainer.example import SmallTransformer, SyntheticTokens
    from .trainer.loop import Outcome, Trainer
    from .training import train

_HOMES = {
    "Budget": "memory.budget",
    "Checkpoints": "saving.checkpoint",
    "CommProfiler": "comm.profiler",
    "ConfigError": "ddpkit.settings.training",
    "Deadline": "guarding.deadline",
    "Here": "joining.process_group",
    "MemoryMonitor": "memory.monitor",
    "Outcome": "trainer.loop",
    "SafeLoader": "loading.loader",
    "SmallTransformer": "trainer.example",
    "SyntheticTokens": "trainer.example",
    "TrainConfig": "ddpkit.settings.training",
    "Trainer": "trainer.loop",
    "UnevenData": "loading.loader",
    "WorkerDied": "loading.loader",
    "WorkerTimedOut": "loading.loader",
    "all_finite": "guarding.guard",
    "check_replicas": "guarding.guard",
    "check_steps": "guarding.guard",
    "host_memory": "memory.smaller_host",
    "is_out_of_memory": "memory.budget",
    "load_weights": "saving.weights",
    "log_to": "logs",
    "memory_budget": "memory.budget",
    "report": "reports",
    "safe_loader": "loading.loader",
    "setup": "joining.process_group",
    "train": "training",
    "unused_parameters": "guarding.guard",
    "validate_config": "ddpkit.settings.training",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ddpkit.rank' has no attribute {name!r}; it offers {', '.join(__all__)}")
    from importlib import import_module

    home = _HOMES[name]
    value = getattr(import_module(home if home.startswith("ddpkit.") else f".{home}", __name__), name)
    globals()[name] = value
    return value
