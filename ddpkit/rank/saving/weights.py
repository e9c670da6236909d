"""`load_weights`: reads a model's weights from a file in any of the usual layouts, with or without DDP's prefix."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

# The names under which files keep the weights; a file may also hold nothing but the weights.
LAYOUTS = ("model_state", "model_state_dict", "state_dict", "model")
PREFIXES = ("module.", "_orig_mod.")


class WeightsError(RuntimeError):
    """A file's weights cannot be loaded."""


def load_weights(path: str | Path, model: torch.nn.Module, trust: bool = False) -> dict[str, Any]:
    """Load the weights in `path` into `model`, and return what else is in the file (epoch, optimizer state, ...).

    The weights may be under `model_state`, `model_state_dict`, `state_dict` or `model`, or be the whole file; their names
    may begin with `module.` (DDP) or `_orig_mod.` (torch.compile). `model` may be wrapped or not. The file is read to the
    CPU, so that the ranks do not all load to one GPU. Load before the model is wrapped, or on every rank.

    Args:
        path: a file that `torch.save` wrote, or a folder that `Checkpoints` wrote.
        trust: also read a file that holds more than tensors and plain values. Unpickling such a file runs its code.

    Raises:
        WeightsError: the file is not whole, holds no weights, or the weights of another model.
    """
    file = Path(path) / "model.pt" if Path(path).is_dir() else Path(path)
    held = _read(file, trust)
    rest, weights = {}, held
    for key in LAYOUTS:
        if isinstance(held.get(key), dict):
            rest, weights = dict(held), dict(held[key])
            del rest[key]
            break
    if not weights or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise WeightsError(f"load_weights: {file} holds no weights: it has {', '.join(map(str, held)) or 'nothing'}.")
    bare = _bare(model)
    weights = _without_prefixes(weights, set(bare.state_dict()))
    try:
        bare.load_state_dict(weights)
    except RuntimeError as error:
        raise WeightsError(f"load_weights: the weights in {file} are of another model. {error}") from None
    return rest


def _without_prefixes(weights: dict[str, Any], wanted: set[str]) -> dict[str, Any]:
    """`weights` without the prefixes that all names have, unless the model's own names have them."""
    while weights and not wanted & set(weights):
        prefix = next(iter(weights)).partition(".")[0] + "."
        if prefix not in PREFIXES or not all(name.startswith(prefix) for name in weights):
            break
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights


def _bare(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DDP's and torch.compile's wrappers."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
    return model


def _read(file: Path, trust: bool) -> dict[str, Any]:
    try:
        held = torch.load(file, map_location="cpu", weights_only=not trust)
    except FileNotFoundError:
        raise WeightsError(f"load_weights: there is no file {file}.") from None
    except pickle.UnpicklingError as error:
        what = str(error).partition("\n")[0]
        for line in reversed(str(error).splitlines()):
            if "GLOBAL" in line:
                what = line.strip()
        raise WeightsError(
            f"load_weights: {file} holds more than tensors and plain values, and reading it would run its code. {what} "
            "If you trust where it is from: load_weights(..., trust=True)."
        ) from None
    except (RuntimeError, EOFError, OSError) as error:
        told = str(error).partition("\n")[0] or "it ends too early"
        raise WeightsError(f"load_weights: {file} is not whole: {told}") from None
    return held if isinstance(held, dict) else {}
