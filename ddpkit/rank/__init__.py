"""What a training script may use inside a rank, from `setup` to a whole `Trainer`. What is not named here works without being
called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpkit.config import ConfigError, TrainConfig, validate_config

    from .checkpoint import Checkpoints
    from .comm import CommProfiler
    from .data import SafeLoader, UnevenData, WorkerDied, WorkerTimedOut, safe_loader
    from .deadline import Deadline
    from .example import SmallTransformer, SyntheticTokens
    from .guard import all_finite, check_replicas, check_steps, unused_parameters
    from .logs import log_to
    from .memory import Budget, is_out_of_memory, memory_budget
    from .monitor import MemoryMonitor
    from .process_group import Here, setup
    from .reports import report
    from .trainer import Outcome, Trainer
    from .training import train
    from .weights import load_weights

_HOMES = {
    "process_group": ("setup", "Here"),
    "logs": ("log_to",),
    "reports": ("report",),
    "memory": ("memory_budget", "Budget", "is_out_of_memory"),
    "monitor": ("MemoryMonitor",),
    "data": ("safe_loader", "SafeLoader", "WorkerDied", "WorkerTimedOut", "UnevenData"),
    "guard": ("check_steps", "check_replicas", "all_finite", "unused_parameters"),
    "deadline": ("Deadline",),
    "checkpoint": ("Checkpoints",),
    "weights": ("load_weights",),
    "comm": ("CommProfiler",),
    "example": ("SmallTransformer", "SyntheticTokens"),
    "trainer": ("Trainer", "Outcome"),
    "training": ("train",),
    "ddpkit.config": ("TrainConfig", "ConfigError", "validate_config"),
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

    value = getattr(import_module(home if "." in home else f".{home}", __name__), name)
    globals()[name] = value
    return value
