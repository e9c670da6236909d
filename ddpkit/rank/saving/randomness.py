"""The states of a rank's random generators, in a form that `torch.load(weights_only=True)` reads back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, and of the GPU `device`."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy_state: Any = np.random.get_state()
    kind, keys, *rest = numpy_state
    states["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Set the generators to `states`."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(states["torch"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
