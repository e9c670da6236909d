"""Reads a log of any size once and keeps what tells of a failure: lines that the catalog knows, exceptions, ends of processes.

Only lines that hold a word of some signature are looked at closely; one automaton finds those words in all of the log. After
each such line the next ones are looked at too, to see whether the job went on.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ahocorasick_rs import BytesAhoCorasick

from ddpkit.diagnosis.pages import Page, Signature, pages

from . import deaths
from .deaths import Deaths, End
from .lines import Line, Reader, Source, chunks
from .literals import required
from .tracebacks import RAISED, Raised, Tracebacks

# So many lines after a telling one are read, to see whether the job went on.
AFTERMATH = 150
# Where a log tells of failures all along, only the next few, after so many.
MOST_AFTERMATH, SHORT_AFTERMATH = 50_000, 5
# Of lines that differ in their digits alone so many are read.
MOST_ALIKE = 600
MOST_SHAPES = 20_000
# One telling word in so many bytes, or more: it pays to go line by line.
DENSE_BYTES = 400
MOST_HITS = 4_000
MOST_PROGRESS = 50_000
MOST_RANKS = 65_536
TAIL_LINES = 60
TAIL_BYTES = 1 << 15

_ALWAYS = (
    b"traceback",
    b"error:",
    b"exception: ",
    b"keyboardinterrupt",
    b"exception ignored",
    b"--- logging error",
)
# What varies in lines that are alike: numbers, and hexadecimal ones.
_DIGITS = b"0123456789abcdef"
_BAR = re.compile(r"\b(?P<n>\d+)/\d+ \[(?:\d+:)?\d+:\d+<")
_COUNTED = re.compile(
    r"(?i)\b(?P<what>step|iter|iteration|epoch|batch|global_step|num_updates|update|training result)s?\b[\"']?"
    r"\s*[:=\[#/ ]\s*\[?\s*(?P<n>\d+)"
)
_COMPLETED = re.compile(
    r"(?i)(?<![-\w])(?:(?:pre-?)?training|fine-?tuning|fit(?:ting)?|run|job|experiment|trainer\.fit|script|evaluation)\b(?!-)"
    r"[^\n]{0,60}?\b(?:completed?|finished|done|succeeded|successful(?:ly)?|reached|stopped: `max)"
    r"|train_runtime|worker group successfully finished|\bexit(?:ed)?\b.{0,20}\bcode:? 0\b"
    r"|\bphase\b.{0,20}\bSucceeded\b|\b(?:done|finished|completed) (?:training|successfully)"
)
_FAILED = re.compile(r"(?i)fail|error|exit(?:ed)?\b.{0,20}\bcode:? [1-9]|killed|cancel")


@dataclass(frozen=True)
class Hit:
    """A line that `signature` of `page` matches; `rank` wrote it, or is named in it. `order`: the how-many-th telling line."""

    line: Line
    order: int
    page: Page
    signature: Signature
    rank: int | None
    raised: bool = False


@dataclass
class Scan:
    """What a log, or several, say of a failure. Its telling lines are numbered by their order, over all logs.

    `progress` are steps that were reached, `completed` tells where each file last said that all was done, `cut` where a
    traceback began that the file's end cut off; `tail` are each file's last lines, `lines` counts all;
    `last_end` is the last process that ended with an error. `noisy` are the lengths of the files that tell of failures all
    along.
    """

    hits: list[Hit] = field(default_factory=list)
    raised: list[tuple[int, Raised]] = field(default_factory=list)
    ends: list[tuple[int, End]] = field(default_factory=list)
    progress: list[tuple[int, Line, str, tuple[int, ...]]] = field(default_factory=list)
    completed: dict[str, int] = field(default_factory=dict)
    cut: list[tuple[str, int]] = field(default_factory=list)
    tail: dict[str, tuple[Line, ...]] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    noisy: dict[str, int] = field(default_factory=dict)
    lines: int = 0
    seen: int = 0
    last_end: int = -1


@dataclass(frozen=True)
class _Words:
    """The automaton over all signatures' words, and which signatures each word belongs to."""

    automaton: BytesAhoCorasick
    of: tuple[tuple[tuple[Page, Signature], ...], ...]
    deadly: frozenset[int]


@cache
def _words() -> _Words:
    owners: dict[bytes, list[tuple[Page, Signature]]] = {word: [] for word in _ALWAYS}
    deadly = [word.encode() for word in deaths.WORDS]
    for each in deadly:
        owners.setdefault(each, [])
    for page in pages():
        for signature in page.signatures:
            for word in required(signature.pattern) if signature.in_logs else ():
                owners.setdefault(word.encode(), []).append((page, signature))
    words = list(owners)
    automaton = BytesAhoCorasick(words)
    return _Words(automaton, tuple(tuple(owners[w]) for w in words), frozenset(words.index(w) for w in deadly))


def scan(logs: list[Source]) -> Scan:
    """Read every log of `logs`, in their order."""
    found = Scan()
    for source in logs:
        _OneLog(source, found).read()
    found.ends = deaths.with_ranks(found.ends)
    found.last_end = max((at for at, end in found.ends if end.exitcode), default=-1)
    return found


class _OneLog:
    def __init__(self, source: Source, into: Scan) -> None:
        self._source, self._into, self._words = source, into, _words()
        self._reader: Reader | None = None
        self._tracebacks, self._deaths = Tracebacks(), Deaths()
        self._alike: Counter[bytes] = Counter()
        self._summary_rank: int | None = None
        self._spawned: int | None = None
        self._attends = self._attended = self._looked_at = 0

    def read(self) -> None:
        number, last = 1, b""
        for chunk in chunks(self._source):
            if self._reader is None:
                self._reader = Reader(self._source, chunk)
            self._read_chunk(chunk, number)
            number += chunk.count(b"\n")
            last = (last + chunk)[-TAIL_BYTES:]
        self._into.lines += number - 1 + (not last.endswith(b"\n") and bool(last))
        self._into.cut += [(self._source.name, at) for at in self._tracebacks.cut(number)]
        if self._attended >= MOST_AFTERMATH:
            self._into.noisy[self._source.name] = number
        self._read_tail(last, number - 1)

    def _read_chunk(self, chunk: bytes, number: int) -> None:
        """Go from one line that holds a word to the next; through every line where the last one asked for that.

        A carriage return ends a line as well: a progress bar writes itself anew after each. It has no number of its own.
        """
        low = chunk.lower().replace(b"\r", b"\n")
        starts = [start for _, start, _ in self._words.automaton.find_matches_as_indexes(low)]
        if len(starts) > len(low) // DENSE_BYTES and b"\r" not in chunk:
            self._read_dense(chunk, low, number)
            return
        starts.append(len(low))
        at = index = 0
        while at < len(low):
            if not self._attends:
                while starts[index] < at:
                    index += 1
                if starts[index] == len(low):
                    return
                begin = low.rfind(b"\n", at, starts[index]) + 1 or at
                number += chunk.count(b"\n", at, begin)
                at = begin
            end = low.find(b"\n", at)
            end = len(low) if end < 0 else end
            if self._attends or self._is_new(low[at:end]):
                self._attends = max(0, self._attends - 1)
                self._look(number, chunk[at:end], low[at:end])
            number += chunk[end : end + 1] == b"\n"
            at = end + 1

    def _read_dense(self, chunk: bytes, low: bytes, number: int) -> None:
        """Where nearly every line holds a word: all of them in turn, by their shapes alone as long as many are alike."""
        shapes = low.translate(None, _DIGITS).split(b"\n")
        for at, (shape, raw) in enumerate(zip(shapes, chunk.split(b"\n"), strict=True)):
            if self._attends or self._alike.get(shape, 0) < MOST_ALIKE:
                self._alike[shape] += 1
                self._attends = max(0, self._attends - 1)
                self._look(number + at, raw, raw.lower())
        if len(self._alike) > MOST_SHAPES:
            self._alike.clear()

    def _is_new(self, low: bytes) -> bool:
        """Whether few lines have been read that differ from this one in numbers alone."""
        shape = low.translate(None, _DIGITS)
        self._alike[shape] += 1
        if len(self._alike) > MOST_SHAPES:
            self._alike.clear()
        return self._alike[shape] <= MOST_ALIKE

    def _look(self, number: int, raw: bytes, low: bytes) -> None:
        """Take in one line."""
        words = {word for word, _, _ in self._words.automaton.find_matches_as_indexes(low, overlapping=True)}
        if not low.strip() or not (words or self._attends):
            return
        assert self._reader is not None
        for line in self._reader.lines(number, raw):
            if line.rank is not None and len(self._into.ranks) < MOST_RANKS:
                self._into.ranks.add(line.rank)
            told = self._take(line, words)
            self._looked_at = number
            if told:
                self._attends = AFTERMATH if self._attended < MOST_AFTERMATH else SHORT_AFTERMATH
            self._attended += 1
            self._note_progress(line, told)

    def _take(self, line: Line, words: set[int]) -> bool:
        """Whether the line tells of a failure."""
        into, order = self._into, self._order()
        line = self._of_the_summary(line)
        quoted = self._tracebacks.inside(line)
        raised = self._tracebacks.feed(line)
        told = raised is not None
        if (
            raised is None
            and words
            and not quoted
            and (named := RAISED.match(line.text.lstrip()))
            and "Warning" not in named["type"]
            and not self._tracebacks.ignores(line)
        ):
            raised = Raised(line, named["type"], (named["message"] or "").strip())
        if raised is not None:
            _keep(into.raised, (order, raised))
            told = True
        if words & self._words.deadly and not quoted and (end := self._deaths.feed(line)):
            _keep(into.ends, (order, end))
            told = True
        if raised is not None and raised.type == "EOFError" and "multiprocessing/spawn" in raised.text:
            # The child of a process that failed while it sent itself over.
            words = set()
        candidates = [each for word in sorted(words) for each in self._words.of[word]]
        if raised is not None and raised.text:
            block = raised.text.lower().encode()
            inside = {word for word, _, _ in self._words.automaton.find_matches_as_indexes(block, overlapping=True)}
            spanning = [each for word in sorted(inside) for each in self._words.of[word] if each[1].spans_lines]
            told |= self._match(spanning, raised.text, line, order, True, raised.text)
        if not quoted:
            text = _without_module(line.text.lstrip(), raised)
            told |= self._match(candidates, text, line, order, raised is not None, raised.text if raised else "")
        return told or bool(self._tracebacks)

    def _of_the_summary(self, line: Line) -> Line:
        """A traceback in torchrun's summary is that of the rank above it; one that `spawn` passes on is that of its process."""
        if _SUMMARY_TRACEBACK.match(line.text):
            self._summary_rank = self._deaths.rank
        elif spawned := _SPAWNED.match(line.text):
            self._spawned = int(spawned[1])
        elif self._summary_rank is not None and not line.text.startswith("  "):
            self._summary_rank = None
        rank = self._summary_rank if self._summary_rank is not None else self._spawned
        return line._replace(rank=rank, key="summary") if line.rank is None and rank is not None else line

    def _match(
        self, candidates: list[tuple[Page, Signature]], text: str, line: Line, order: int, raised: bool, block: str
    ) -> bool:
        told = False
        for page, signature in dict.fromkeys(candidates):
            if signature.type and not (raised and text.startswith(signature.type)) and not signature.spans_lines:
                continue
            if signature.where == "torchrun" and not _OF_TORCHRUN.search(block or text):
                continue
            found = signature.pattern.search(text)
            if found is None:
                continue
            told = told or not signature.beside
            _keep(self._into.hits, Hit(line, order, page, signature, _rank_named(found, line), raised))
        return told

    def _note_progress(self, line: Line, told: bool) -> None:
        """Note that the job came to its end; and a step that it has reached, if the line does not tell of a failure."""
        into = self._into
        if _COMPLETED.search(line.text) and not _FAILED.search(line.text):
            into.completed[line.file] = self._order()
        if told or len(into.progress) >= MOST_PROGRESS:
            return
        counted = [(each["what"].lower(), int(each["n"])) for each in _COUNTED.finditer(line.text)]
        if bar := _BAR.search(line.text):
            counted = [("bar", int(bar["n"]))]
        if counted:
            kind = " ".join(what for what, _ in counted)
            into.progress.append((self._order(), line, kind, tuple(number for _, number in counted)))

    def _order(self) -> int:
        self._into.seen += 1
        return self._into.seen

    def _read_tail(self, last: bytes, number: int) -> None:
        assert self._reader is not None or not last
        if self._reader is None:
            return
        rows = last.splitlines()[-TAIL_LINES:]
        tail: deque[Line] = deque(maxlen=TAIL_LINES)
        for back, raw in enumerate(reversed(rows)):
            tail.extendleft(reversed(list(self._reader.lines(max(1, number - back), raw))))
        self._into.tail[self._source.name] = tuple(tail)
        for line in tail:
            if line.number > self._looked_at:
                self._note_progress(line, False)


_SUMMARY_TRACEBACK = re.compile(r"^\s*traceback\s*: Traceback")
_SPAWNED = re.compile(r"^-- Process (\d+) terminated with the following error")
_OF_TORCHRUN = re.compile(r"torch[./]distributed|c10d|TCPStore|torchrun|elastic|rendezvous|run\.py|usage")
_MODULE = re.compile(r"^(?:\w+\.)+(?=\w+)")


def _keep(found: list[Any], one: Any) -> None:
    """Keep the first ones and the newest; what is too much goes from the middle."""
    if len(found) >= MOST_HITS:
        del found[MOST_HITS // 2]
    found.append(one)


def _without_module(text: str, raised: Raised | None) -> str:
    """`DistNetworkError: ...` of `torch.distributed.DistNetworkError: ...`, as signatures name exceptions."""
    return _MODULE.sub("", text) if raised is not None else text


def _rank_named(found: re.Match[str], line: Line) -> int | None:
    """The rank that the signature's own group tells, else the one that wrote the line."""
    told = found.groupdict().get("rank")
    return line.rank if told is None else int(told) if told.isdigit() else None
