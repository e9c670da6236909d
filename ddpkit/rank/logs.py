"""`log_to`: Python's logging for a job of many ranks: a file per rank, the console for rank 0, errors from every rank.

`ddpkit diagnose` reads these logs.
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
    """Write this rank's log; returns the logger "ddpkit", whose children the kit itself uses.

    Each rank writes `rank_<r>.log` in `folder`, with time, rank and level in each line, tracebacks too. Rank 0 also prints to
    stdout, and every rank prints its errors to stderr. No process group is needed. A second call replaces the first.

    Args:
        folder: of the files; None: no files there. A rank of a ddpkit job also writes one into its own folder of the run,
            which `run.ranks[r].log` reads.
        level: the lowest level that is written: DEBUG, INFO, WARNING, ERROR or CRITICAL.
        as_json: write a line of JSON for each record, to `rank_<r>.jsonl`.

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
        # Errors go to stderr already.
        handlers.append(_to(sys.stdout, _Lines(""), below=logging.ERROR))
    lines = _Json(rank) if as_json else _Lines(f"[rank{rank}]: ", timed=True)
    if folder is not None:
        name_there = f"rank_{rank}.{'jsonl' if as_json else 'log'}"
        handlers.append(_file(Path(folder) / name_there, lines))
    if (own := wire.own_rank_folder()) is not None:
        handlers.append(_file(own / wire.LOG, lines))
    return _logger(handlers, name)


def _logger(handlers: list[logging.Handler], level: str) -> logging.Logger:
    """The logger "ddpkit" with these handlers only. Its records do not reach the root logger, which would repeat them."""
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
    """A handler that prints the records from level `least` to below level `below`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(lines)
    handler.addFilter(lambda record: least <= record.levelno < below)
    return handler


class _Lines(logging.Formatter):
    """`[DDP-INFO] epoch 1`, with `before` and, if `timed`, the time before each line: the lines of several ranks may be
    mixed, those of a traceback too."""

    def __init__(self, before: str, timed: bool = False) -> None:
        super().__init__()
        self._before, self._timed = before, timed

    def format(self, record: logging.LogRecord) -> str:
        before = f"{self.formatTime(record)} {self._before}" if self._timed else self._before
        said = f"[DDP-{record.levelname}] {super().format(record)}"
        return "\n".join(before + line for line in said.split("\n"))


class _Json(logging.Formatter):
    """A record as one line of JSON."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": at.isoformat(timespec="milliseconds"),
            "rank": self._rank,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
