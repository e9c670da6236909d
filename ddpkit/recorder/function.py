"""Runs a notebook function in a rank, and hands its return value back."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from typing import Any

from ddpkit.runfolder import wire


def load(script: str) -> dict[str, Any]:
    """The notebook's names that the function uses, for the globals of the file `script`.

    ddpkit wrote that file into the run folder, next to the pickled call; spawned workers find the names there.
    """
    import cloudpickle

    folder = Path(script).parent
    context = wire.read_record(folder / wire.CALL_CONTEXT) or {}
    sys.path.extend(p for p in context.get("sys_path", []) if p not in sys.path)
    for file, source in context.get("sources", {}).items():
        # Without a modification time linecache never looks for the file, which exists only in the kernel.
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
