"""`report`: hands a rank's values to the notebook, as JSON lines that `Run.reported` reads."""

from __future__ import annotations

import json
import time
from typing import Any

from ddpkit.runfolder import wire


def report(**values: Any) -> None:
    """Hand `values` to the caller of `launch`: `run.reported[rank]` has the latest value of each name.

    Numbers, strings, lists and dicts are sent as they are, tensors and arrays as numbers or nested lists. Outside a ddpkit
    job this does nothing, so the script also runs under plain torchrun.

    Raises:
        TypeError: a value has no JSON form; the message names it.
    """
    folder = wire.own_rank_folder()
    for name, value in values.items():
        try:
            json.dumps(value, default=_as_json)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"report: {name}= is a {type(value).__name__}, which has no JSON form ({error}); "
                f"hand over a number, string, list, dict or tensor."
            ) from None
    if folder is None:
        return
    line = json.dumps({"at_ns": time.time_ns(), "values": values}, default=_as_json)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / wire.REPORTS, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def _as_json(value: Any) -> Any:
    """Tensors and arrays have `tolist`, so torch need not be imported."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
