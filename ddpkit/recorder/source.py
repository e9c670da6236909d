"""Finds what a line of the program stands under: an `if`, above all one about the rank, and loops."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

# By these a backward has no collective.
_MAY_NOT_SYNC = re.compile(r"\b(no_sync|require_backward_grad_sync)\b")
# `if rank == 0`, `if here.rank`, `if args.local_rank < 1`, `if is_main_process()`, `if self.main`, `if writer is not None`.
_ABOUT_RANK = re.compile(
    r"rank|is_?(main|master|primary|leader|chief)|main_?process"
    r"|\b(main|master|primary|leader|chief|coordinator|writer|reporter)\b(?![(.])",
    re.IGNORECASE,
)

# `for label in sorted(self.seen)`, `for name, total in totals.items()`, but not `for batch in set(batches)`.
_KINDS = re.compile(
    r"\b(set|sorted)\(|unique|class|categor|\b(keys|items|values|parameters|named_\w+|modules|children)\("
)
_LEAVES = re.compile(r"\b_?exit$|\babort$")
_DATA = re.compile(r"load|batch|data|sample|shard|chunk|file", re.IGNORECASE)


def about_rank(file: str, line: int) -> str:
    """`if rank == 0`, the innermost one around that line (or `else` of it); "" where there is none or no source."""
    around = [test for first, last, test in _tests(_source(file)) if first <= line <= last]
    return around[-1] if around else ""


class Loop(NamedTuple):
    """A loop: `at` is its `file:line`, `always` whether every turn comes to the line that was asked about, `to_the_end` whether
    it ends only as the batches do that it goes through, or other data, with no turn cut short."""

    at: str
    always: bool
    to_the_end: bool


def loops(file: str, line: int) -> list[Loop]:
    """The loops around that line, the innermost first."""
    around = [found for found in _loops(_source(file)) if found[0] <= line <= found[1]]
    return [
        Loop(f"{file}:{first}", first > choice(file, line), to_the_end) for first, _, to_the_end in reversed(around)
    ]


def choice(file: str, line: int) -> int:
    """The line of the innermost `if` or the like by which that line, or a call on it, may be passed by; 0: there is none."""
    source = _source(file)
    return max((first for first, chosen in _choices(source) if line in chosen), default=0)


def may_return_before(file: str, line: int) -> bool:
    """Whether the function may return before it comes to that line, under an `if` or the like."""
    functions = (
        node for node in ast.walk(_parsed(_source(file))) if isinstance(node, ast.FunctionDef) and line in _lines(node)
    )
    own = max(functions, key=lambda node: node.lineno, default=None)
    return own is not None and any(isinstance(n, ast.Return) and n.lineno < line for n in ast.walk(own))


def may_swallow(file: str, line: int) -> bool:
    """Whether what is raised at that line may be swallowed in its function, by an `except` that does not pass it on."""
    tries = (node for node in ast.walk(_parsed(_source(file))) if isinstance(node, ast.Try) and _swallows(node))
    return any(line in _lines(statement) for node in tries for statement in node.body)


def _swallows(node: ast.Try) -> bool:
    """Whether the program goes on after what this `try` catches; that of a key of the user's is no error."""
    return not all(_passes_on(handler) for handler in node.handlers)


def _passes_on(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    leaves = (
        isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and _LEAVES.search(ast.unparse(last.value.func))
    )
    interrupted = handler.type is not None and ast.unparse(handler.type) == "KeyboardInterrupt"
    return isinstance(last, ast.Raise) or bool(leaves) or interrupted


def _source(file: str) -> str:
    return "".join(linecache.getlines(file))


@cache
def _choices(source: str) -> tuple[tuple[int, range], ...]:
    """The line of each `if`, `match`, `try`, `except`, `and`, `or` and `continue`, and of each loop that calls what it goes
    through, with the lines that depend on it."""
    found: list[tuple[int, range]] = []
    for node in ast.walk(_parsed(source)):
        chosen: list[ast.stmt | ast.expr] = []
        if isinstance(node, ast.If):
            chosen = [*node.body, *node.orelse]
        elif isinstance(node, ast.ExceptHandler | ast.match_case):
            chosen = [*node.body]
        elif isinstance(node, ast.Try) and _swallows(node):
            # What fails in it leaves out the rest of it.
            chosen = [*node.body]
        elif isinstance(node, ast.BoolOp):
            chosen = _calls(node.values[1:])
        elif isinstance(node, ast.IfExp):
            chosen = _calls([node.body, node.orelse])
        elif isinstance(node, ast.For):
            chosen = _told_in_turn(node)
        line = node.pattern.lineno if isinstance(node, ast.match_case) else getattr(node, "lineno", 0)
        found += [(line, _lines(child)) for child in chosen]
        if isinstance(node, ast.For | ast.While):
            turns = [n for n in ast.walk(node) if isinstance(n, ast.Continue)]
            found += [(n.lineno, range(n.lineno + 1, (node.end_lineno or 0) + 1)) for n in turns]
    return tuple(found)


def _calls(nodes: Iterable[ast.expr]) -> list[ast.stmt | ast.expr]:
    return [call for node in nodes for call in ast.walk(node) if isinstance(call, ast.Call)]


def _told_in_turn(loop: ast.For) -> list[ast.stmt | ast.expr]:
    """The calls, statements of their own, of what a loop goes through, as `callback.on_epoch_end(self)`: each rank may have
    others. Where something comes of the call, as of each layer's, the ranks have the same ones."""
    turning = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    told = [n.value for n in ast.walk(loop) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    return [call for call in told if _called(call.func) in turning]


def _called(func: ast.expr) -> str:
    """The name of what is called or asked: `callback` in `callback.on_end()` and in `getattr(callback, event)()`."""
    if isinstance(func, ast.Call) and func.args and ast.unparse(func.func) == "getattr":
        func = func.args[0]
    while isinstance(func, ast.Attribute):
        func = func.value
    return func.id if isinstance(func, ast.Name) else ""


def _lines(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or 0) + 1)


@cache
def _loops(source: str) -> tuple[tuple[int, int, bool], ...]:
    """First and last line of each loop, and whether it goes on to its end; outer ones first."""
    nodes = (node for node in ast.walk(_parsed(source)) if isinstance(node, ast.For | ast.While))
    always_syncs = not _MAY_NOT_SYNC.search(source)
    return tuple(
        sorted((node.lineno, node.body[-1].end_lineno or 0, always_syncs and _to_the_end(node)) for node in nodes)
    )


def _to_the_end(loop: ast.For | ast.While) -> bool:
    if not isinstance(loop, ast.For) or _goes_on_from(loop.iter) or _is_through_kinds(loop.iter):
        return False
    return not any(isinstance(node, ast.Break | ast.Continue | ast.Return | ast.Try) for node in ast.walk(loop))


def _goes_on_from(iterable: ast.expr) -> bool:
    """Whether it is `range(start, end)`: a rank that resumes has its own start."""
    if not (isinstance(iterable, ast.Call) and ast.unparse(iterable.func) == "range"):
        return False
    return len(iterable.args) > 1 and not isinstance(iterable.args[0], ast.Constant)


def _is_through_kinds(iterable: ast.expr) -> bool:
    """Whether it is the classes that occur, or the like, rather than the samples themselves."""
    source = ast.unparse(iterable)
    return bool(_KINDS.search(source)) and not _DATA.search(source)


@cache
def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


@cache
def _tests(source: str) -> tuple[tuple[int, int, str], ...]:
    """First and last line of each block under an `if` about the rank, and the `if` itself; outer ones first."""
    found = []
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.If) and _ABOUT_RANK.search(test := ast.unparse(node.test)):
            blocks = [(node.body, f"if {test}"), (node.orelse, f"else of if {test}")]
            found += [(block[0].lineno, block[-1].end_lineno or 0, words) for block, words in blocks if block]
    return tuple(sorted(found, key=lambda block: (block[0], -block[1])))
