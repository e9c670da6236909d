"""Which words must be in a text that a regular expression matches: what lets gigabytes of log be read for hundreds of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

SHORTEST = 4
# A part of an expression that may match more texts than this has too many words.
MOST_TEXTS = 16
_UNKNOWN: frozenset[str] = frozenset()


def required(pattern: re.Pattern[str]) -> frozenset[str]:
    """Lower-case words of which at least one is in every text that `pattern` matches; empty where none can be told.

    Of a chain of parts the one whose shortest word is longest is taken; of alternatives, one word for each.
    """
    _, words = _of_sequence(_parser.parse(pattern.pattern, pattern.flags & re.IGNORECASE))
    return words if _shortest(words) >= SHORTEST else _UNKNOWN


def _of_sequence(parsed: Iterable[tuple[Any, Any]]) -> tuple[frozenset[str], frozenset[str]]:
    """All texts that a chain of parts may match, if they are few, and the words of which one is in each of them."""
    texts, best, few = frozenset([""]), _UNKNOWN, True
    for op, argument in parsed:
        of_part, words = _of_part(op, argument)
        if of_part and len(texts) * len(of_part) <= MOST_TEXTS:
            texts = frozenset(before + after for before in texts for after in of_part)
        else:
            best = max(best, texts, words, key=_shortest)
            texts, few = frozenset([""]), False
    return texts if few else _UNKNOWN, max(best, texts, key=_shortest)


def _of_part(op: Any, argument: Any) -> tuple[frozenset[str], frozenset[str]]:
    """The same of one part."""
    if op is _constants.SUBPATTERN:
        return _of_sequence(argument[-1])
    if op is _constants.BRANCH:
        each = [_of_sequence(branch) for branch in argument[1]]
        return _of_any(texts for texts, _ in each), _of_any(words for _, words in each)
    if op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT) and argument[0]:
        return _UNKNOWN, _of_sequence(argument[2])[1]
    letters = argument if op is _constants.IN else [(op, argument)]
    if all(kind is _constants.LITERAL and chr(code) != "\n" for kind, code in letters):
        return frozenset(chr(code).lower() for _, code in letters), _UNKNOWN
    return _UNKNOWN, _UNKNOWN


def _of_any(alternatives: Iterable[frozenset[str]]) -> frozenset[str]:
    each = list(alternatives)
    return frozenset().union(*each) if all(each) else _UNKNOWN


def _shortest(words: frozenset[str]) -> int:
    return min(map(len, words), default=0)
