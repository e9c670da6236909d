"""Sees what a rank does outside of torch.distributed: whether it waits for a lock on a file that another process holds, or looks
at something again and again, in which loops it is, and what it has before it."""

from __future__ import annotations

import ast
import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

# proc(5): `2: FLOCK ADVISORY WRITE 2001 08:01:7864554 0 EOF`, and below it with an arrow who waits for that lock.
_LOCK = re.compile(r"\d+:(?P<waits> +->)? +\w+ +\w+ +\w+ +(?P<pid>-?\d+) (?P<file>\S+)")
_SLEEPS = re.compile(r"\bsleep\(")
_EXCHANGES = {"send", "isend", "recv", "irecv"}
_FILL = ("append", "extend", "add", "insert", "pop", "popleft")
# What these give depends on their arguments, or on the time, alone.
_ITS_OWN = re.compile(r"(len|min|max|sum|abs|int|float|round|any|all|sorted|time\.\w+)$")


def locked_by(threads: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[int, int]:
    """By process the one that holds the lock on a file for which it waits, as the kernel has them; for those whose `threads`
    py-spy has read, of a lock of the filelock library's too, which asks for it again and again."""
    waits, holders, holder = dict[int, int](), dict[str, int](), 0
    for lock in filter(None, map(_LOCK.match, _locks_of_the_kernel())):
        if lock["waits"]:
            waits[int(lock["pid"])] = holder
        else:
            holder = holders[lock["file"]] = int(lock["pid"])
    for pid, own in threads.items():
        if (file := _asked_by_filelock(own)) in holders:
            waits[pid] = holders[file]
    return {pid: holder for pid, holder in waits.items() if holder > 0 and holder != pid}


def _locks_of_the_kernel() -> list[str]:
    with contextlib.suppress(OSError):
        return Path("/proc/locks").read_text(encoding="ascii").splitlines()
    return []


def _asked_by_filelock(threads: Sequence[Mapping[str, Any]]) -> str:
    """The file, as the kernel numbers it, whose lock is being acquired in one of these threads; "" where none is."""
    frames = (frame for thread in threads for frame in thread["frames"])
    inside = (frame for frame in frames if "filelock" in Path(frame["filename"]).parts)
    for local in (local for frame in inside for local in frame["locals"] or ()):
        if local["name"] == "lock_filename":
            with contextlib.suppress(OSError):
                found = os.stat(str(local["repr"]).strip("\"'"))
                return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    return ""


def polls(source: str, line: int) -> bool:
    """Whether that line of a program sleeps in a `while` that ends once something has come."""
    lines = source.splitlines()
    if not 0 < line <= len(lines) or not _SLEEPS.search(lines[line - 1]):
        return False
    around = [n for n in _loops(source) if isinstance(n, ast.While) and _has(n.body, line)]
    return bool(around) and _ends(around[-1])


def loops(source: str, line: int) -> list[int]:
    """The first lines of the loops around that line of a program."""
    return [n.lineno for n in _loops(source) if _has(n.body, line)]


def exchanges_ahead(source: str, line: int) -> list[str]:
    """The sends and receives, as they are called, below that line in the function around it, or in the program outside of any."""
    within = [n for n in _nodes(source) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and _has(n.body, line)]
    calls = (n for n in (ast.walk(within[-1]) if within else _nodes(source)) if isinstance(n, ast.Call))
    return sorted({n.func.attr for n in calls if n.lineno > line and isinstance(n.func, ast.Attribute)} & _EXCHANGES)


def _loops(source: str) -> list[ast.For | ast.While]:
    return [node for node in _nodes(source) if isinstance(node, ast.For | ast.While)]


@lru_cache(maxsize=16)
def _nodes(source: str) -> tuple[ast.AST, ...]:
    with contextlib.suppress(SyntaxError, ValueError):
        return tuple(ast.walk(ast.parse(source)))
    return ()


def _has(body: Iterable[ast.stmt], line: int) -> bool:
    return any(statement.lineno <= line <= (statement.end_lineno or 0) for statement in body)


def _ends(loop: ast.While) -> bool:
    """Whether a `while` ends once something has come: its condition, or that of an `if` by which it is left from within, looks
    at what the loop itself does not make."""
    left_by = [n.test for n in ast.walk(loop) if isinstance(n, ast.If) and any(map(_leaves, ast.walk(n)))]
    made = _made_in(loop)
    return any(_looks(part, made) for test in (loop.test, *left_by) for part in _parts(test))


def _leaves(node: ast.AST) -> bool:
    return isinstance(node, ast.Break | ast.Return)


def _parts(test: ast.expr) -> list[ast.expr]:
    """What is joined by `and`, `or` and `not` in a condition."""
    if isinstance(test, ast.BoolOp):
        return [part for value in test.values for part in _parts(value)]
    return _parts(test.operand) if isinstance(test, ast.UnaryOp) else [test]


def _made_in(loop: ast.While) -> dict[str, list[ast.expr]]:
    """The names that a loop sets, counts or appends to, each with what it is made of."""
    made: dict[str, list[ast.expr]] = {}
    for node in ast.walk(loop):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AugAssign):
            targets, value = [node.target], node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FILL:
            targets, value = [node.func.value], ast.Constant(None)
        for target in targets:
            made.setdefault(ast.unparse(target), []).append(value)
    return made


def _looks(test: ast.expr, made: Mapping[str, Sequence[ast.expr]]) -> bool:
    """Whether a condition may turn by what others do: it calls something, or holds nothing that the loop makes by itself."""
    names = {ast.unparse(n) for n in ast.walk(test) if isinstance(n, ast.Name | ast.Attribute)}
    calls = (n for e in (test, *(v for name in names for v in made.get(name, ()))) for n in ast.walk(e))
    if any(isinstance(n, ast.Call) and not _ITS_OWN.match(ast.unparse(n.func)) for n in calls):
        return True
    of_time = any(isinstance(n, ast.Call) and ast.unparse(n.func).startswith("time.") for n in ast.walk(test))
    return not isinstance(test, ast.Constant) and not of_time and names.isdisjoint(made)
