"""What a training script may use inside a rank, from `setup` to a whole `Trainer`. What is not named here works without being
called."""

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
    "joining.process_group": ("setup", "Here"),
    "logs": ("log_to",),
    "reports": ("report",),
    "memory.budget": ("memory_budget", "Budget", "is_out_of_memory"),
    "memory.monitor": ("MemoryMonitor",),
    "memory.smaller_host": ("host_memory",),
    "loading.loader": ("safe_loader", "SafeLoader", "WorkerDied", "WorkerTimedOut", "UnevenData"),
    "guarding.guard": ("check_steps", "check_replicas", "all_finite", "unused_parameters"),
    "guarding.deadline": ("Deadline",),
    "saving.checkpoint": ("Checkpoints",),
    "saving.weights": ("load_weights",),
    "comm.profiler": ("CommProfiler",),
    "trainer.example": ("SmallTransformer", "SyntheticTokens"),
    "trainer.loop": ("Trainer", "Outcome"),
    "training": ("train",),
    "ddpkit.settings.training": ("TrainConfig", "ConfigError", "validate_config"),
}

__all__ = [
    "Budget",
    "Checkpoints",
    "CommProfiler",
    "ConfigError",
    "Deadline",
    "Here",
    "MemoryMonitor",
    "Outcome",
    "SafeLoader",
    "SmallTransformer",
    "SyntheticTokens",
    "TrainConfig",
    "Trainer",
    "UnevenData",
    "WorkerDied",
    "WorkerTimedOut",
    "all_finite",
    "check_replicas",
    "check_steps",
    "host_memory",
    "is_out_of_memory",
    "load_weights",
    "log_to",
    "memory_budget",
    "report",
    "safe_loader",
    "setup",
    "train",
    "unused_parameters",
    "validate_config",
]


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'ddpkit.rank' has no attribute {name!r}; it offers {', '.join(__all__)}")
    from importlib import import_module

    value = getattr(import_module(home if home.startswith("ddpkit.") else f".{home}", __name__), name)
    globals()[name] = value
    return value
