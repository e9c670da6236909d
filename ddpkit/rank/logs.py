"""`log_to`: Python's own logging for a job of many ranks: a file per rank, the console for rank 0, errors from everybody.

What it writes is read by `ddpkit diagnose`, and in a job of ddpkit by whoever looks into the run's folder.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from pathlib import Path
from typing import TextIO

from ddpkit.rank.joining import environment
from ddpkit.runfolder import wire

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def log_to(folder: str | os.PathLike[str] | None = None, level: str = "INFO", as_json: bool = False) -> logging.Logger:
    """Have this rank's log written; the logger that it returns is "ddpkit", whose children the kit's own rooms use.

    Each rank writes a file `rank_<r>.log` in `folder`, every line with time, rank and level, tracebacks too. Rank 0 also
    prints to stdout, and every rank prints its errors to stderr. It may be called before there is a process group, and
    without one; a second call replaces what the first has set.

    Args:
        folder: where the files go; it is made. Without, none is written there. A rank of a ddpkit job always writes one
            into its own folder of the run as well, which `run.ranks[r].log` reads.
        level: the least that is written: DEBUG, INFO, WARNING, ERROR or CRITICAL.
        as_json: write a line of JSON for each record instead, to `rank_<r>.jsonl`.

    Raises:
        ValueError: there is no such level.
        OSError: the file cannot be written.
    """
    name = str(level).upper()
    if name not in LEVELS:
        raise ValueError(f'log_to: level "{level}" is not one of {", ".join(LEVELS)}.')
    rank = environment.rank()
    handlers: list[logging.Handler] = [_to(sys.stderr, _Lines(f"[rank{rank}]: "), least=logging.ERROR)]
    if rank == 0:
        # What goes to stderr need not be told twice.
        handlers.append(_to(sys.stdout, _Lines(""), below=logging.ERROR))
    lines = _Json(rank) if as_json else _Lines(f"[rank{rank}]: ", timed=True)
    if folder is not None:
        name_there = f"rank_{rank}.{'jsonl' if as_json else 'log'}"
        handlers.append(_file(Path(folder) / name_there, lines))
    if (own := wire.own_rank_folder()) is not None:
        handlers.append(_file(own / wire.LOG, lines))
    return _logger(handlers, name)


def _logger(handlers: list[logging.Handler], level: str) -> logging.Logger:
    """The logger "ddpkit" with these handlers and no others. Its records do not go on to the root's, which would repeat them."""
    logger = logging.getLogger("ddpkit")
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    return logger


def _file(path: Path, lines: logging.Formatter) -> logging.Handler:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(lines)
    return handler


def _to(stream: TextIO, lines: logging.Formatter, least: int = 0, below: int = 100) -> logging.Handler:
    """A handler that prints the records from level `least` and below level `below`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(lines)
    handler.addFilter(lambda record: least <= record.levelno < below)
    return handler


class _Lines(logging.Formatter):
    """`[DDP-INFO] epoch 1`, with `before` and, where `timed`, the time before each line: a traceback's lines must tell whose
    they are where the lines of several ranks are mixed."""

    def __init__(self, before: str, timed: bool = False) -> None:
        super().__init__()
        self._before, self._timed = before, timed

    def format(self, record: logging.LogRecord) -> str:
        before = f"{self.formatTime(record)} {self._before}" if self._timed else self._before
        said = f"[DDP-{_level(record)}] {super().format(record)}"
        return "\n".join(before + line for line in said.split("\n"))


class _Json(logging.Formatter):
    """A record as an object of JSON on one line, under the names that collectors of logs know."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": at.isoformat(timespec="milliseconds"),
            "rank": self._rank,
            "level": _level(record),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _level(record: logging.LogRecord) -> str:
    """The four words that the prefixes have; what is worse than an error is one."""
    known = (logging.ERROR, "ERROR"), (logging.WARNING, "WARNING"), (logging.INFO, "INFO")
    return next((word for least, word in known if record.levelno >= least), "DEBUG")
