"""Which words must be in a text that a regular expression matches: what lets gigabytes of log be read for hundreds of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

SHORTEST = 4


def required(pattern: re.Pattern[str]) -> frozenset[str]:
    """Lower-case words of which at least one is in every text that `pattern` matches; empty where none can be told.

    Of a chain of parts the one whose shortest word is longest is taken; of alternatives, one word for each.
    """
    words = _of_sequence(_parser.parse(pattern.pattern, pattern.flags & re.IGNORECASE))
    return words if words and min(map(len, words)) >= SHORTEST else frozenset()


def _of_sequence(parsed: Iterable[tuple[Any, Any]]) -> frozenset[str]:
    best: frozenset[str] = frozenset()
    run = ""
    for op, argument in [*parsed, (None, None)]:
        letter = _letter(op, argument)
        if letter:
            run += letter
            continue
        for found in (frozenset([run]) if run else frozenset(), _of_part(op, argument), _continued(run, op, argument)):
            if found and _worth(found) > _worth(best):
                best = found
        run = ""
    return best


def _continued(run: str, op: Any, argument: Any) -> frozenset[str]:
    """`run` with the letters that each of the alternatives after it begins with."""
    if op is _constants.SUBPATTERN and len(argument[-1]) == 1:
        op, argument = argument[-1][0]
    if not run or op is not _constants.BRANCH:
        return frozenset()
    return frozenset(run + _head(branch) for branch in argument[1])


def _head(parsed: Iterable[tuple[Any, Any]]) -> str:
    letters = (_letter(op, argument) for op, argument in parsed)
    return "".join(itertools.takewhile(bool, letters))


def _worth(words: frozenset[str]) -> int:
    return min(map(len, words), default=0)


def _letter(op: Any, argument: Any) -> str:
    """The one letter that `op` stands for, whatever its case; "" where there are several, and at the end of a line."""
    if op is _constants.LITERAL:
        return chr(argument).lower().strip("\n")
    if op is _constants.IN and all(kind is _constants.LITERAL for kind, _ in argument):
        letters = {chr(code).lower() for _, code in argument}
        return letters.pop() if len(letters) == 1 else ""
    return ""


def _of_part(op: Any, argument: Any) -> frozenset[str]:
    if op is _constants.SUBPATTERN:
        return _of_sequence(argument[-1])
    if op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
        return _of_sequence(argument[2]) if argument[0] else frozenset()
    if op is _constants.BRANCH:
        each = [_of_sequence(branch) for branch in argument[1]]
        return frozenset().union(*each) if all(each) else frozenset()
    return frozenset()
