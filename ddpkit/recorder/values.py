"""What a rank brings to a collective of few numbers or an object, where that may be how it tells the others of an error."""

from __future__ import annotations

import contextlib
import re
import sys
import zlib
from collections.abc import Mapping
from typing import Any

# To sum these up takes some microseconds.
MOST_SUMMED = 32_768
OF_OBJECTS = ("all_gather_object", "broadcast_object_list")
_BAD = re.compile(r"err|fail|exc|abort", re.IGNORECASE)
_GOOD = re.compile(r"ok(ay)?|success(ful)?|succeeded|healthy|done|passed", re.IGNORECASE)


def number_of(op: str, asked: Mapping[str, Any]) -> float | None:
    """The number that this rank brings to a collective of these arguments, or the sum of those; None where it brings too many, or
    has them on a GPU, for which one would have to wait. Of objects, 1 where one tells of an error, else 0; of a text that is
    gathered, a checksum, as it may be an error or what all must have alike, and 0 where it says that all is well."""
    with contextlib.suppress(Exception):
        if op in OF_OBJECTS:
            gathered = "obj" in asked
            told = asked["obj" if gathered else "object_list"]
            tells = _tells_of_an_error(told, by_any_text=gathered)
            return float(zlib.crc32(told.encode()) if tells and isinstance(told, str) else tells)
        tensor = asked["tensor"] if "tensor" in asked else asked["input_tensor"]
        if (op.startswith("all_") or op == "broadcast") and tensor.device.type == "cpu":
            if tensor.numel() == 1:
                return float(tensor.detach().item())
            if 1 < tensor.numel() <= MOST_SUMMED:
                return float(tensor.detach().sum(dtype=sys.modules["torch"].float64))
    return None


def _tells_of_an_error(told: Any, by_any_text: bool) -> bool:
    """Whether an object says that something went wrong, as far as its names and texts tell; or `by_any_text`, where ranks may be
    held against each other. Of a flag, whether it is set."""
    if isinstance(told, str):
        return bool(told) and not _GOOD.fullmatch(told) and (by_any_text or bool(_BAD.search(told)))
    if isinstance(told, BaseException | bool):
        return bool(told)
    named = (
        told
        if isinstance(told, dict)
        else told._asdict()
        if hasattr(told, "_asdict")
        else getattr(told, "__dict__", {})
    )
    for name, value in named.items():
        if _BAD.search(str(name)):
            return bool(value)
        if _GOOD.fullmatch(str(name)):
            return not value
    several = isinstance(told, list | tuple) and not named
    return several and any(_tells_of_an_error(each, by_any_text) for each in told)
