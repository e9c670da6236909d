"""Reads a log of any size once and keeps what tells of a failure: lines that the catalog knows, exceptions, ends of processes.

One automaton finds the words that signatures need. Only lines with such a word are read closely, and some lines after each, to
see whether the job went on.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ahocorasick_rs import BytesAhoCorasick

from ddpkit.diagnosis.pages import Page, Signature, all_signatures

from . import deaths
from .deaths import Deaths
from .found import Hit, Scan
from .launches import DIGITS, Launches
from .lines import Line, Reader, Source, chunks
from .literals import required
from .progress import AFTERMATH
from .tracebacks import Raised, Tracebacks

# In a log that tells of failures all along, only a few lines are read after each, from so many on.
MOST_AFTERMATH, SHORT_AFTERMATH = 50_000, 5
# So many lines are read that differ in their digits alone.
MOST_ALIKE = 600
MOST_SHAPES = 20_000
MOST_HITS = 4_000
TAIL_LINES = 60
TAIL_BYTES = 1 << 15

# Words of Python's own lines.
_ALWAYS = ("traceback", "error:", "exception: ", "keyboardinterrupt", "exception ignored", "--- logging error")
_SUMMARY_TRACEBACK = re.compile(r"^\s*traceback\s*: Traceback")
_SPAWNED = re.compile(r"^-- Process (\d+) terminated with the following error")
_OF_TORCHRUN = re.compile(r"torch[./]distributed|c10d|TCPStore|torchrun|elastic|rendezvous|run\.py|usage")
# An exception whose message goes on in the next line.
_UNFINISHED = re.compile(r"[\]:,(]\s*$|\w(?:Error|Exception)$")
_MODULE = re.compile(r"^(?:\w+\.)+(?=\w+)")


@dataclass(frozen=True)
class _Words:
    """Every word of a failure: an automaton that finds them, and the signatures that need each."""

    automaton: BytesAhoCorasick
    of: list[list[tuple[Page, Signature]]]

    def inside(self, low: bytes) -> set[int]:
        """The words in a text of lower-case letters."""
        return {word for word, _, _ in self.automaton.find_matches_as_indexes(low, overlapping=True)}

    def signatures(self, words: set[int]) -> Iterator[tuple[Page, Signature]]:
        """The signatures that need one of `words`, each once."""
        return iter(dict.fromkeys(each for word in sorted(words) for each in self.of[word]))


@cache
def _words() -> _Words:
    needing: dict[str, list[tuple[Page, Signature]]] = {word: [] for word in (*_ALWAYS, *deaths.WORDS)}
    for page, signature in all_signatures():
        for word in required(signature.pattern) if signature.in_logs else ():
            needing.setdefault(word, []).append((page, signature))
    return _Words(BytesAhoCorasick([word.encode() for word in needing]), list(needing.values()))


def scan(logs: list[Source]) -> Scan:
    """Read every log of `logs`, in their order."""
    found = Scan()
    for source in logs:
        _OneLog(source, found).read()
    found.ends = deaths.with_ranks(found.ends)
    return found


class _OneLog:
    def __init__(self, source: Source, into: Scan) -> None:
        self._source, self._into, self._words = source, into, _words()
        self._reader = Reader(source, b"")
        self._tracebacks, self._deaths, self._launches = Tracebacks(), Deaths(), Launches(b"")
        self._alike: Counter[bytes] = Counter()
        self._reported_rank: int | None = None
        self._said: Raised | None = None
        self._attends = self._attended = self._looked_at = 0

    def read(self) -> None:
        number, last = 1, b""
        for chunk in chunks(self._source):
            if not last:
                self._reader, self._launches = Reader(self._source, chunk), Launches(chunk)
            self._reader.learn(chunk)
            self._read_chunk(chunk, number)
            number += chunk.count(b"\n")
            last = (last + chunk)[-TAIL_BYTES:]
        self._into.lines += number - 1 + (not last.endswith(b"\n") and bool(last))
        self._into.cut += [(self._source.name, at) for at in self._tracebacks.cut(number)]
        self._read_tail(last, number - 1)

    def _read_chunk(self, chunk: bytes, number: int) -> None:
        """Read closely the lines of a chunk with a word, of those that differ in digits alone only the first ones."""
        low, end = chunk.lower(), 0
        words = [start for _, start, _ in self._words.automaton.find_matches_as_indexes(low)]
        if not self._attends and not words:
            return
        alike = self._alike
        for at, (shape, raw) in _rows(chunk, low):
            begin, end = end, end + len(raw) + 1
            new = alike[shape] < MOST_ALIKE
            if self._attends or (new and bisect_left(words, begin) < bisect_left(words, end)):
                alike[shape] += 1
                self._attends = max(0, self._attends - 1)
                self._look(number + at, raw, raw.lower())
        if len(self._alike) > MOST_SHAPES:
            self._alike.clear()

    def _look(self, number: int, raw: bytes, low: bytes) -> None:
        """Read one line."""
        words = self._words.inside(low)
        if not low.strip() or not (words or self._attends):
            return
        for line in self._in_order(self._reader.lines(number, raw)):
            if line.rank is not None:
                self._into.ranks.add(line.rank)
            if self._launches.begins(line, low, self._into.ranks):
                self._into.launches[line.file] = number
            told = self._take(line, words)
            self._looked_at = number
            if told or self._tracebacks:
                self._attends = AFTERMATH if self._attended < MOST_AFTERMATH else SHORT_AFTERMATH
            self._attended += 1
            self._into.progress.note(line, told or self._tracebacks.inside(line))

    def _take(self, line: Line, words: set[int]) -> bool:
        """Keep what a line tells of a failure; whether it does."""
        line = self._with_reported_rank(line)
        quoted = self._tracebacks.inside(line)
        raised = self._tracebacks.feed(line, alone=bool(words))
        told = raised is not None
        if (said := self._said) and self._goes_on(said, line):
            if raised is not None:
                # A message that is the name and message of another exception: that one was raised.
                raised = replace(raised, frames=said.frames, text=f"{said.text}\n{line.text}")
                self._into.raised.remove(said)
            else:
                told |= self._read_on(said, line)
        self._said = raised
        text = line.text.lstrip()
        if raised is not None:
            _keep(self._into.raised, raised)
            self._launches.failed |= not raised.type.endswith("Warning")
            # Signatures name `DistNetworkError`, not `torch.distributed.DistNetworkError`.
            text = _MODULE.sub("", text)
        if words and not quoted and (end := self._deaths.feed(line)):
            _keep(self._into.ends, end)
            told = self._launches.failed = self._launches.ended = True
        if raised is not None and raised.text:
            for page, signature in self._words.signatures(self._words.inside(raised.text.lower().encode())):
                if signature.spans_lines:
                    told |= self._match(page, signature, raised.text, line, raised)
        for page, signature in self._words.signatures(set() if quoted else words):
            told |= self._match(page, signature, text, line, raised)
        return told

    def _goes_on(self, said: Raised, line: Line) -> bool:
        """Whether the message of an exception goes on in `line`, the next of its writer."""
        same = said.line.writer == line.writer and said.line.number + 1 == line.number
        return same and bool(_UNFINISHED.search(said.line.text) or line.text[:1].isspace())

    def _read_on(self, raised: Raised, line: Line) -> bool:
        """Keep what the second line of a message tells of a failure, alone or with the first; whether it does."""
        text = line.text.lstrip()
        first, second = raised.line, line._replace(order=raised.line.order)
        whole = f"{first.text} {text}"
        told = False
        for page, signature in self._words.signatures(self._words.inside(whole.lower().encode())):
            if signature.pattern.search(first.text):
                continue
            alone = signature.pattern.search(text) and self._match(page, signature, text, second, raised)
            told |= alone or self._match(page, signature, whole, first._replace(text=whole), raised)
        return told

    def _with_reported_rank(self, line: Line) -> Line:
        """The line with the rank that torchrun's summary or `spawn` gives to the traceback it belongs to."""
        if _SUMMARY_TRACEBACK.match(line.text):
            self._reported_rank = self._deaths.rank
        elif spawned := _SPAWNED.match(line.text):
            self._reported_rank = int(spawned[1])
        elif line.text.startswith(("--", "==")):
            self._reported_rank = None
        rank = self._reported_rank
        return line if rank is None or line.rank is not None else line._replace(rank=rank, key="summary")

    def _match(self, page: Page, signature: Signature, text: str, line: Line, raised: Raised | None) -> bool:
        """Keep a match of `signature` in `text`; whether it tells of a failure."""
        if signature.type and not (raised and text.startswith(signature.type)) and not signature.spans_lines:
            return False
        whole = raised.text if raised and raised.text else text
        if signature.where == "torchrun" and not _OF_TORCHRUN.search(whole):
            return False
        found = signature.pattern.search(text)
        if found is None:
            return False
        named = tuple(int(rank) for rank in re.findall(r"\d+", found.groupdict().get("rank") or ""))
        rank = line.rank if not named else named[0] if len(named) == 1 else None
        _keep(self._into.hits, Hit(line, page, signature, rank, raised is not None, named))
        return not signature.beside

    def _in_order(self, lines: Iterable[Line]) -> Iterator[Line]:
        """The lines, each with its place among all that were read."""
        for line in lines:
            self._into.seen += 1
            yield line._replace(order=self._into.seen)

    def _read_tail(self, last: bytes, number: int) -> None:
        tail: list[Line] = []
        rows = last.splitlines()[-TAIL_LINES:]
        for at, raw in enumerate(rows, number - len(rows) + 1):
            tail += self._in_order(self._reader.lines(max(1, at), raw))
        self._into.tail[self._source.name] = tuple(tail[-TAIL_LINES:])
        for line in tail:
            if line.number > self._looked_at:
                self._into.progress.note(line, False)


def _rows(chunk: bytes, low: bytes) -> Iterable[tuple[int, tuple[bytes, bytes]]]:
    """The line feeds before each line, what is left of it without digits, and the line itself.

    A carriage return, which progress bars write, ends a line as well, but is not counted.
    """
    shapes = low.translate(None, DIGITS).split(b"\n")
    rows = enumerate(zip(shapes, chunk.split(b"\n"), strict=True))
    if b"\r" not in chunk:
        return rows
    return ((at, pair) for at, row in rows for pair in zip(*(part.split(b"\r") for part in row), strict=True))


def _keep(found: list[Any], one: Any) -> None:
    """Keep the first ones and the newest; what is too much goes from the middle."""
    if len(found) >= MOST_HITS:
        del found[MOST_HITS // 2]
    found.append(one)
