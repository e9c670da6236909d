"""Lines of logs, whatever form they have: their file, number and rank, without what launchers put before them."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ddpkit.errors import LogError

CHUNK_BYTES = 1 << 20
# Enough to see how the lines of a file begin.
HEAD_BYTES = 1 << 16
LONGEST_LINE = 20_000
MOST_IN_JSON = 300
MOST_PREFIXES = 5
MOST_LEARNED = 64
SHORTEST_TWICE, LONGEST_TWICE = 8, 400
KINDS = ("*.log", "*.out", "*.err", "*.txt", "*.log.gz", "error.json")

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*|[()]?.)|[\x07\x08\u200b\ufeff]")

# What a launcher or a collector of logs puts before a line: `rank` where it names one, `key` what tells writers apart. A line
# may have several.
_PREFIXES = tuple(
    re.compile(p)
    for p in (
        # Kubernetes, docker, CRI and loggers; journald; the kernel.
        r"[\[(]?\d{4}[-/]\d\d[-/]\d\d[T _]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?[\])]?:?[ \t]+(?!\d+ main\b)",
        r"std(?:out|err) [FP] ",
        r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]+ (?P<key>[\w./@-]+(?:\[\d+\])?): ",
        r"\[[ \d]{1,6}\d\.\d{6}\] ",
        # An error that torchrun logs; a warning keeps its letter.
        r"E\d{4} \d\d:\d\d:\d\d\.\d+ \d+ \S+\.py:\d+\] ",
        # torchrun --tee, torch.distributed's own, mpirun, SageMaker.
        r"\[(?:default|trainer|worker|(?i:rank)[ :=]*)(?P<rank>\d+)\]:? ?",
        r"\[(?:\d+,)?(?:mpirank:)?(?P<rank>\d+)(?:,algo-\d+)?\] ?(?:<std(?:out|err)>: ?|(?=\[\d{4}-))",
        # Ray, DeepSpeed over pdsh.
        r"\((?P<key>[A-Za-z_][\w.<>]* ?(?:\([^)]*\) )?pid=\d+(?:, ip=[\d.]+)?)(?:, (?:world_)?rank=(?P<rank>\d+))?\) ",
    )
)
# What an editor puts before every line: no rank.
_NUMBERED = re.compile(r"^ *\[?\d{1,4}\]?:(?: |$)")
# `srun -l` puts a number before every line; pdsh, docker compose, kubectl --prefix put the name of a host or container.
_LABELLED = re.compile(
    r"^ *\[?(?:(?P<rank>\d{1,4})\]?:(?: |$)|(?!(?:step|iter|epoch|batch))"
    r"(?P<key>(?=[\w./-]*\d)[\w./-]*[A-Za-z][\w./-]*|(?:\d{1,3}\.){3}\d{1,3})(?:: |\] | +\| ))"
)
_FRAME = re.compile(r'(?P<before>[^"\']{1,100}?[\s:|>\])])  File "[^"]+", line \d+')
_VARIES = re.compile(r"\d{4}[-/]\d\d[-/]\d\d|\d[\d.]*(?::\d[\d.,]*)+Z?|^\W*\d+[^\w\]]*$")
_RANK_BEFORE = re.compile(r"(?i)\brank\W{0,2}(\d+)|^\[(\d{1,4})\]:? ?$")
# Where the line of another process begins in the midst of a line.
_GLUED = re.compile(r"(?<=[^\s:>|)])(?=\[rank\d+\]:)|(?<=[^\s:>|)+-])(?=Traceback \(most recent call last\):)")
_OF_TORCH = re.compile(r"\[(?:PG [^\]]*)?Rank (\d+)\] ")
_SAYS_RANK = re.compile(r"(?i)\[(?:global_)?rank[ :=]*(\d+)\]|(?:^|Error: )rank (\d+)[:,] ")
_RAY = re.compile(r"pid=(\d+)\) world_rank=(\d+)")
_PID = re.compile(r"pid=(\d+)")
# Where collectors of logs that write JSON put the line, what followed it, and the rank.
_TEXTS = "log message msg data textPayload text MESSAGE exc_info exception traceback stack".split()
_RANKS = ("rank", "global_rank", "process_index")
_OF_A_FILE = re.compile(r"rank[_.=-]?(\d+)(?!\d)|attempt_\d+/(\d+)/(?:std(?:out|err)\.log|error\.json)$")


class Line(NamedTuple):
    """A line of a log: `number` counts from 1 in `file`, `rank` wrote it (None: unknown), `key` tells writers apart.

    `order` counts the lines that are read closely, over all logs.
    """

    file: str
    number: int
    rank: int | None
    key: str
    text: str
    order: int = 0

    @property
    def writer(self) -> tuple[int | None, str]:
        """What its writer's lines have in common."""
        return self.rank, self.key


@dataclass(frozen=True)
class Source:
    """A log to read: `name` as it is shown; its `path`, else its `data`, else standard input."""

    name: str
    path: Path | None = None
    data: bytes | None = None

    def open(self) -> BinaryIO:
        """The log's bytes, unpacked if gzip packed them."""
        if self.data is not None:
            return BytesIO(self.data)
        if self.path is None:
            return sys.stdin.buffer
        if self.path.suffix == ".gz":
            return gzip.open(self.path)  # type: ignore[return-value]
        return self.path.open("rb")

    @property
    def rank(self) -> int | None:
        """The rank in the file's name: `train_rank3.log`, or torchrun's `attempt_0/3/stderr.log`."""
        found = _OF_A_FILE.search(self.name)
        return int(found[1] or found[2]) if found else None


def sources(asked: Sequence[str | Path]) -> list[Source]:
    """The logs that `asked` names: files, patterns such as `logs/*.err`, folders (all logs in them), `-` for standard input.

    Raises:
        LogError: one of them names nothing that can be read.
    """
    found: dict[str, Source] = {}
    for each in asked:
        for source in _named(str(each)):
            found.setdefault(source.name, source)
    return list(found.values())


def _named(asked: str) -> Iterator[Source]:
    if asked == "-":
        yield Source("<stdin>")
        return
    path = Path(asked).expanduser()
    if path.is_dir():
        inside = sorted({f for kind in KINDS for f in path.rglob(kind) if f.is_file()}, key=_natural)
        if not inside:
            kinds = ", ".join(KINDS)
            raise LogError(f"diagnose: {asked} is a folder without logs ({kinds}). Name the files themselves.")
        yield from (Source(str(f), f) for f in inside)
    elif path.exists():
        yield Source(asked, path)
    else:
        matched = sorted(map(Path, glob(str(path), recursive=True)), key=_natural)
        if not matched:
            raise LogError(f"diagnose: {asked} is not there: no file, folder or pattern of that name. See `ls`.")
        for one in matched:
            yield from _named(str(one)) if one.is_dir() else [Source(str(one), one)]


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts `rank10.log` after `rank9.log`."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", str(path))]


def chunks(source: Source) -> Iterator[bytes]:
    """The log in pieces of about a megabyte, cut where a line ends; a longer line is cut anywhere.

    Raises:
        LogError: it cannot be read.
    """
    try:
        with source.open() as file:
            rest = b""
            while block := file.read(CHUNK_BYTES):
                block = rest + block
                cut = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
                if not cut:
                    cut = len(block) if len(block) > CHUNK_BYTES else 0
                rest = block[cut:]
                if cut:
                    yield block[:cut]
            if rest:
                yield rest
    except OSError as error:
        raise LogError(f"diagnose: {source.name} cannot be read: {error.strerror or error}.") from None


def _of_json(text: str) -> tuple[int | None, list[str]]:
    """The rank and the texts of a line that is a JSON object; no texts where it is not one."""
    try:
        told = json.loads(text) if text.startswith("{") else {}
    except ValueError:
        told = {}
    # torchrun's error file: the message with its traceback beside it.
    if isinstance(inner := told.get("message"), dict):
        told = {**inner, "message": inner.get("extraInfo", {}).get("py_callstack") or inner.get("message")}
    texts = [told[name] for name in _TEXTS if isinstance(told.get(name), str)]
    rank = next((told[name] for name in _RANKS if isinstance(told.get(name), int)), None)
    return rank, texts


class Reader:
    """Turns the raw lines of one log into `Line`s."""

    def __init__(self, source: Source, head: bytes) -> None:
        self.name = source.name
        self.rank = source.rank
        # Ray Train says once which process is which rank.
        text = head[:HEAD_BYTES].decode("utf-8", "replace")
        self._rank_of = {pid: int(rank) for pid, rank in _RAY.findall(text)}
        lines = [line for line in text.splitlines() if line.strip()]
        labels = [label for line in lines if (label := _LABELLED.match(line))]
        numbers = [int(label["rank"] or -1) for label in labels]
        counted = len(numbers) > 2 and numbers == [*range(numbers[0], numbers[0] + len(numbers))]
        self._prefixes = _PREFIXES
        if counted and (numbers[0] > 0 or len(numbers) > 8):
            self._prefixes = (_NUMBERED, *_PREFIXES)
        elif len(labels) > 0.3 * len(lines):
            self._prefixes = (_LABELLED, *_PREFIXES)
        self._before: dict[str, None] = {}
        self._learned: re.Pattern[str] | None = None
        self._json = bool(lines) and all(_of_json(line)[1] for line in lines[:3])
        told = {rank for line in lines if (rank := self._stripped(line)[0]) is not None}
        # A file with lines of other ranks is not named after the rank that wrote it.
        if told - {self.rank}:
            self.rank = None

    def learn(self, chunk: bytes) -> None:
        """Learn what precedes the frames of tracebacks in `chunk`: the same precedes their writers' other lines."""
        seen, at = set[bytes](), chunk.find(b'  File "')
        while at >= 0 and len(seen) < MOST_LEARNED:
            begin = max(chunk.rfind(b"\n", 0, at), chunk.rfind(b"\r", 0, at)) + 1
            if (before := chunk[begin:at]).strip() and before not in seen:
                seen.add(before)
                text = self._line(0, chunk[begin : at + 300].decode("utf-8", "replace")).text
                if (found := _FRAME.match(text)) and (head := found["before"].rstrip()):
                    shape = re.sub(r"(?:\\ )+", r"\\s+", re.sub(r"\d+", r"\\d+", re.escape(head)))
                    self._before[shape + re.escape(found["before"][len(head) :])] = None
                    self._learned = re.compile("|".join(sorted(self._before, key=len, reverse=True)))
            at = chunk.find(b'  File "', at + 1)

    def lines(self, number: int, raw: bytes) -> Iterator[Line]:
        """The line of that number without its prefixes; a line of JSON may hold several."""
        text = raw[:LONGEST_LINE].decode("utf-8", "replace").rstrip()
        rank, texts = _of_json(text) if self._json else (None, [])
        if not texts:
            yield from (self._line(number, part) for part in _GLUED.split(text))
            return
        for each in "\n".join(texts).split("\n")[:MOST_IN_JSON]:
            line = self._line(number, each.rstrip())
            yield line if line.rank is not None or rank is None else line._replace(rank=rank)

    def _line(self, number: int, text: str) -> Line:
        rank, key, text = self._stripped(_ESCAPES.sub("", text))
        # Two processes that write at once.
        period = (text + text).find(text, 1) if len(text) < LONGEST_TWICE else 0
        text = text[:period] if SHORTEST_TWICE < period < len(text) else text
        if rank is None and self._rank_of and (pid := _PID.search(key)):
            rank = self._rank_of.get(pid[1])
        if of_torch := _OF_TORCH.search(text[:200]):
            # torch prints the global rank; a launcher's prefix may be the local one.
            rank = int(of_torch[1])
        elif rank is None and (said := _SAYS_RANK.search(text[:200])):
            rank = int(said[1] or said[2])
            key = key or f"rank {rank}"
        return Line(self.name, number, self.rank if rank is None else rank, key, text)

    def _stripped(self, text: str) -> tuple[int | None, str, str]:
        rank, key, at = None, "", 0
        for _ in range(MOST_PREFIXES):
            found = next(filter(None, (prefix.match(text, at) for prefix in self._prefixes)), None)
            if found is None:
                break
            at, told = found.end(), found.groupdict()
            rank = int(told["rank"]) if told.get("rank") else rank
            key += told.get("key") or told.get("rank") or ""
        if self._learned and (found := self._learned.match(text, at)):
            at = found.end()
            key += re.sub(r"\W+", " ", _VARIES.sub("", found[0]))
            if said := _RANK_BEFORE.search(found[0]):
                rank = int(said[1] or said[2])
        return rank, key, text[at:]
