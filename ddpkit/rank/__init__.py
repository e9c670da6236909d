"""What a training script may use inside a rank: `setup`, `report` and `memory_budget`. Everything else here works without
being called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .memory import Budget, is_out_of_memory, memory_budget
    from .process_group import Here, setup
    from .reports import report

__all__ = ["Budget", "Here", "is_out_of_memory", "memory_budget", "report", "setup"]

_HOMES = {
    "setup": "process_group",
    "Here": "process_group",
    "report": "reports",
    "memory_budget": "memory",
    "Budget": "memory",
    "is_out_of_memory": "memory",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ddpkit.rank' has no attribute {name!r}; it offers {', '.join(__all__)}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
