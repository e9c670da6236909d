"""Runs a notebook function in a rank: loads what the kernel pickled, calls it, and hands its return value back."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from typing import Any

from ddpkit.runfolder import wire


def load(script: str) -> dict[str, Any]:
    """The names of the notebook that the function uses, for the globals of `script`, so that spawned workers find them.

    `script` is the file that ddpkit wrote into the run folder; the pickled call lies beside it.
    """
    import cloudpickle

    folder = Path(script).parent
    context = wire.read_record(folder / wire.CALL_CONTEXT) or {}
    sys.path.extend(p for p in context.get("sys_path", []) if p not in sys.path)
    for file, source in context.get("sources", {}).items():
        # No modification time: linecache then never looks for the file, which exists in the kernel only.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    with open(folder / wire.CALL, "rb") as pickled:
        function, args, kwargs, names = cloudpickle.load(pickled)
    return {**names, "_ddpkit_call": (function, args, kwargs)}


def call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call `function` and keep what it returns for `run.returned`.

    Raises:
        TypeError: the return value cannot be pickled.
    """
    import cloudpickle

    value = function(*args, **kwargs)
    folder = wire.own_rank_folder()
    if folder is None:
        return
    try:
        pickled = cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"rank {os.environ.get('RANK')} returned a {type(value).__name__} that cannot be pickled ({error}); "
            "return numbers, lists, dicts or tensors."
        ) from None
    part = folder / f"{wire.RETURNED}.part"
    part.write_bytes(pickled)
    os.replace(part, folder / wire.RETURNED)
