"""Follows growing log files as whole lines, without colours, in bounded memory."""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddpkit.display.sink import Line
from ddpkit.runfolder import wire
from ddpkit.runfolder.folders import log_folder

CHUNK = 256 * 1024
LONGEST_LINE = 2_000
MOST_LINES_A_READ = 400
OPEN_LINE_AFTER_S = 0.1
# A time is shown in hundredths of a second; the clock of the file system ticks every few milliseconds.
KNOWN_WITHIN_NS = 20_000_000
_ANSI = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class Tail:
    """One log file of one rank, read on from the last position. The rank has written nothing before `since_ns`.

    When a line was written is nowhere recorded, and a hook in the rank would miss what C++ and child processes write. But
    what is new was written since the file had last been read to its end, and its last byte when the file was last modified.
    If rank 1 writes line by line, each line has its time; of ten lines found together after a second, only the latest
    possible moment is known, and they say so (`exact`).
    """

    def __init__(
        self, path: Path, rank: int, stream: str, attempt: int, every_line: bool = False, since_ns: int = 0
    ) -> None:
        self.path, self.rank, self.stream, self.attempt = path, rank, stream, attempt
        self.seq = 0
        self.skipped = 0
        self._every_line = every_line
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  (kept open as long as the job runs)
        self._rest = b""
        self._cut = 0
        self._rest_since = 0.0
        self._rest_shown = True
        self._read_up_to_ns = since_ns
        self._written_ns, self._exact = 0, False

    def read(self) -> list[Line]:
        """New whole lines, and one open for a while; in a flood, only the newest (`skipped` counts the rest)."""
        began_ns = time.time_ns()
        data = self._file.read(CHUNK)
        if data:
            self._date(alone=data.find(b"\n") in (-1, len(data) - 1))
        else:
            self._read_up_to_ns = began_ns
        *whole, rest = data.split(b"\n")
        lines = self._whole_lines(whole) if whole else []
        self._keep(rest)
        return lines + self._open_line()

    def _date(self, alone: bool) -> None:
        """Note by when the bytes just read were written, and whether that is known well; `alone`: they are of one line."""
        now_ns, found = time.time_ns(), os.fstat(self._file.fileno())
        since_ns, at_end = self._read_up_to_ns, found.st_size == self._file.tell()
        # On a network file system another computer's clock counts, which may be wrong.
        dated = since_ns - KNOWN_WITHIN_NS < found.st_mtime_ns <= now_ns
        self._written_ns = max(found.st_mtime_ns, since_ns) if dated else now_ns
        self._exact = (dated and at_end and alone) or self._written_ns - since_ns <= KNOWN_WITHIN_NS
        if at_end:
            self._read_up_to_ns = now_ns

    def _whole_lines(self, whole: list[bytes]) -> list[Line]:
        """The lines of these texts, the first of which ends the open line."""
        whole[0], cut_of_first = self._rest + whole[0], self._cut
        self._rest, self._cut = b"", 0
        unshown = 0 if self._every_line else max(0, len(whole) - MOST_LINES_A_READ)
        self.skipped += unshown
        self.seq += unshown
        return [self._line(text, 0 if i else cut_of_first) for i, text in enumerate(whole) if i >= unshown]

    @property
    def behind(self) -> bool:
        """Whether the file holds more than has been read."""
        return os.fstat(self._file.fileno()).st_size > self._file.tell()

    @property
    def size(self) -> int:
        """Bytes in the file so far."""
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> list[Line]:
        """The last line, if it has no newline; the file is closed."""
        last = [self._line(self._rest, self._cut)] if self._rest else []
        self._rest = b""
        self._file.close()
        return last

    def _keep(self, rest: bytes) -> None:
        """Keep what follows the last newline, bounded: its beginning, or a progress bar's latest state."""
        if not rest:
            return
        joined = self._rest + rest
        if b"\r" in joined:
            joined = joined[joined.rfind(b"\r", 0, len(joined) - 1) + 1 :]
        if len(joined) > 4 * LONGEST_LINE:
            self._cut += len(joined) - 4 * LONGEST_LINE
            joined = joined[: 4 * LONGEST_LINE]
        if not self._rest:
            self._rest_since = time.monotonic()
        self._rest, self._rest_shown = joined, False

    def _open_line(self) -> list[Line]:
        if self._rest_shown or not self._rest.strip() or time.monotonic() - self._rest_since < OPEN_LINE_AFTER_S:
            return []
        # A progress bar changes more often than it has to be shown.
        self._rest_shown, self._rest_since = True, time.monotonic()
        return [self._line(self._rest, self._cut, is_open=True)]

    def _line(self, raw: bytes, cut: int, is_open: bool = False) -> Line:
        if not is_open:
            self.seq += 1
        text = clean(raw, cut)
        return Line(self.rank, self.stream, self.seq, self._written_ns, text, self.attempt, is_open, self._exact)


def clean(raw: bytes, already_cut: int = 0) -> str:
    """One line's bytes as text that is safe and short enough to show."""
    folded = raw.rstrip(b"\r")
    folded = folded[folded.rfind(b"\r") + 1 :]
    longer = len(folded) - 4 * LONGEST_LINE
    if longer > 0:
        folded = folded[: 4 * LONGEST_LINE]
    text = _CONTROL.sub("�", _ANSI.sub("", folded.decode("utf-8", "replace")))
    more = max(0, len(text) - LONGEST_LINE) + max(0, longer) + already_cut
    return text[:LONGEST_LINE] + f" … {more:,} more characters, see run.ranks" if more else text


class Tails:
    """Every log file of a job, found as torchrun makes them."""

    def __init__(self, folder: Path, world_size: int, exit_fds: Sequence[int], every_line: bool = False) -> None:
        self.folder, self._world_size = folder, world_size
        self.tails: dict[Path, Tail] = {}
        self._ranks = folder / "ranks"
        self._exit_fds = list(exit_fds)
        self._every_line = every_line
        self._notify = _notifier()
        self._seen: set[Path] = set()

    def wait(self, seconds: float) -> None:
        """Return when a log grows, the job's processes end, or after `seconds`."""
        fds = [*self._exit_fds, *([self._notify] if self._notify is not None else [])]
        if self._notify is None:
            seconds = min(seconds, 0.01)
        ready, _, _ = select.select(fds, [], [], seconds)
        if self._notify in ready:
            os.read(self._notify.fileno(), 64 * 1024)
        for fd in set(ready) & set(self._exit_fds):
            self._exit_fds.remove(fd)
            os.close(fd)

    def find(self) -> None:
        """Find new log files. A rank's number is known once it has written its first record."""
        for attempt in sorted(self._ranks.glob("attempt_*/rank_*")):
            if attempt in self._seen or not (started := wire.read_record(attempt / wire.STARTED)):
                continue
            number = int(attempt.parent.name.rsplit("_", 1)[1])
            found = log_folder(self.folder, number, started)
            if found is None:
                continue
            self._seen.add(attempt)
            for stream in wire.STREAMS:
                self._follow(found / f"{stream}.log", started["rank"], stream, number, started["at_ns"])

    @property
    def complete(self) -> bool:
        """Whether every rank of each attempt so far is followed."""
        return bool(self._seen) and len(self._seen) % self._world_size == 0

    def read(self) -> Iterator[Line]:
        """New lines of every rank."""
        for tail in self.tails.values():
            yield from tail.read()

    @property
    def behind(self) -> bool:
        """Whether any file holds more than has been read."""
        return any(tail.behind for tail in self.tails.values())

    @property
    def skipped(self) -> dict[int, int]:
        """How many lines of each rank came too fast to be shown."""
        counts: dict[int, int] = {}
        for tail in self.tails.values():
            counts[tail.rank] = counts.get(tail.rank, 0) + tail.skipped
        return counts

    def close(self) -> list[Line]:
        """Stop following, and return the last lines that had no newline."""
        last = [line for tail in self.tails.values() for line in tail.close()]
        if self._notify is not None:
            self._notify.close()
        for fd in self._exit_fds:
            os.close(fd)
        return last

    def _follow(self, path: Path, rank: int, stream: str, attempt: int, since_ns: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.tails[path] = Tail(path, rank, stream, attempt, self._every_line, since_ns)
            if self._notify is not None:
                from inotify_simple import flags

                self._notify.add_watch(path, flags.MODIFY)


def _notifier():  # type: ignore[no-untyped-def]
    """inotify, which tells that a file has grown; None if the system has none, and files are polled."""
    try:
        from inotify_simple import INotify

        return INotify()
    except (ImportError, OSError):
        return None
