"""Finds the loops, and an `if` about the rank, around a line of a program."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from . import wire
from .frames import nodes_of, sources
from .ranks import Rank

_LEAVES = re.compile(r"\b_?exit$|\babort$")
_SIMPLE = ast.Compare | ast.BoolOp | ast.UnaryOp | ast.BinOp | ast.Call | ast.Subscript | ast.Name | ast.Attribute
_GIVES_RANK = ("get_rank", "get_node_local_rank")
_PASSES_ON = ("int", "bool", "getenv", "get")
_VARIABLES = ("RANK", "LOCAL_RANK")
# How often a name made from the rank may be passed on to another name.
_ROUNDS = 3


@dataclass(frozen=True)
class Program:
    """The texts of a program by file name; a `path` is lines as `file:line`, innermost first."""

    texts: Mapping[str, str]

    @cached_property
    def _known(self) -> dict[tuple[str, ...], dict[str, bool]]:
        return {}

    def loops(self, path: Sequence[str]) -> list[str]:
        """The loops around a line, in any function of its path, as `file:line`, innermost first."""
        return list(self._loops(tuple(path)))

    def every_turn(self, path: Sequence[str]) -> list[str]:
        """The loops around a line in which every turn comes to it."""
        return [loop for loop, always in self._loops(tuple(path)).items() if always]

    def _loops(self, path: tuple[str, ...]) -> dict[str, bool]:
        """The loops around a line, and whether every turn of each comes to it."""
        if path in self._known:
            return self._known[path]
        found, surely = {}, True
        for place in path:
            file, line = self._at(place)
            for first in file.loops_around(line):
                found[f"{place.rpartition(':')[0]}:{first}"] = surely and first > file.choice(line)
            surely = surely and not file.choice(line) and not file.may_return_before(line)
        self._known[path] = found
        return found

    def skipped_by(self, path: Sequence[str], loop: str) -> int:
        """The line of the `continue` by which a turn of that loop may skip a line in it; 0 if there is none."""
        loop_file, first = self._at(loop)
        for place in path:
            file, line = self._at(place)
            if file is not loop_file or first not in file.loops_around(line):
                continue
            for node in file.nodes:
                if isinstance(node, ast.Continue) and node.lineno < line and file.loops_around(node.lineno)[0] == first:
                    return node.lineno
        return 0

    def if_about_rank(self, path: Sequence[str]) -> str:
        """`line 12: if me == 0`: the `if` about the rank that leads to a line; "" if none does."""
        for place in path:
            file, line = self._at(place)
            for node in file.nodes:
                if isinstance(node, ast.If) and _is_in(line, node) and _is_from_rank(node.test, file.made_from_rank):
                    return f"line {node.lineno}: if {ast.unparse(node.test)}"
        return ""

    def _at(self, place: str) -> tuple[_File, int]:
        name, _, line = place.rpartition(":")
        return _file(self.texts.get(name, "")), int(line)


@dataclass(frozen=True)
class _File:
    """One file of a program."""

    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return nodes_of(self.text)

    def loops_around(self, line: int) -> list[int]:
        """The first lines of the loops whose body has that line, innermost first."""
        around = []
        for node in self.nodes:
            if isinstance(node, ast.For | ast.While) and node.lineno <= line <= (node.body[-1].end_lineno or 0):
                around.append(node.lineno)
        return sorted(around, reverse=True)

    def choice(self, line: int) -> int:
        """The line of the innermost branch that may skip that line; 0 if none may."""
        found = 0
        for node in self.nodes:
            for first, last in _may_be_passed_by(node):
                if first <= line <= last:
                    found = max(found, getattr(node, "lineno", first))
        return found

    def may_return_before(self, line: int) -> bool:
        """Whether the function around a line has a `return` before it."""
        functions = [node for node in self.nodes if isinstance(node, ast.FunctionDef) and _is_in(line, node)]
        if not functions:
            return False
        own = max(functions, key=lambda node: node.lineno)
        return any(isinstance(node, ast.Return) and node.lineno < line for node in ast.walk(own))

    @cached_property
    def made_from_rank(self) -> set[str]:
        """The names that the program makes from its rank, directly or through other names."""
        names = {"here.rank"}
        for _ in range(_ROUNDS):
            for node in self.nodes:
                if isinstance(node, ast.FunctionDef) and any(_returns_rank(each, names) for each in ast.walk(node)):
                    names.add(node.name)
                if isinstance(node, ast.Assign) and _is_from_rank(node.value, names):
                    names |= {ast.unparse(target) for target in node.targets}
                if isinstance(node, ast.Call):
                    names |= self._parameters_from_rank(node, names)
        return names

    def _parameters_from_rank(self, call: ast.Call, names: set[str]) -> set[str]:
        """The parameters that this call gives a value from the rank."""
        parameters = self._parameters.get(ast.unparse(call.func), [])
        given = dict(zip(parameters, call.args, strict=False))
        given |= {each.arg: each.value for each in call.keywords if each.arg in parameters}
        return {name for name, value in given.items() if _is_from_rank(value, names)}

    @cached_property
    def _parameters(self) -> dict[str, list[str]]:
        """The parameters of each function, and of each class's `__init__` without `self`."""
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = [each.arg for each in node.args.args]
            if isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                        found[node.name] = [argument.arg for argument in each.args.args[1:]]
        return found


def keep_texts(folder: Path, ranks: Iterable[Rank]) -> None:
    """Save in `folder` the texts of the user's modules through which collectives were called."""
    known, found = sources(folder), {}
    for rank in ranks:
        for place in (*rank.path, *itertools.chain.from_iterable(call.path for call in rank.collectives)):
            name = place.rpartition(":")[0]
            if name not in known and name not in found:
                found[name] = wire.read_text(Path(name))
    if found:
        wire.write_record(folder / wire.SOURCES, (wire.read_record(folder / wire.SOURCES) or {}) | found)


@lru_cache(maxsize=64)
def _file(text: str) -> _File:
    return _File(text)


def _is_in(line: int, node: ast.stmt) -> bool:
    body: list[ast.stmt] = getattr(node, "body", [node])
    last = getattr(node, "orelse", None) or body
    return body[0].lineno <= line <= (last[-1].end_lineno or 0)


def _may_be_passed_by(node: ast.AST) -> Iterator[tuple[int, int]]:
    """The first and last lines of what this branch (`if`, `try`, `and`, `continue` ...) may skip."""
    if isinstance(node, ast.If):
        yield from (_lines(body) for body in (node.body, node.orelse) if body)
    elif isinstance(node, ast.ExceptHandler | ast.match_case) or (isinstance(node, ast.Try) and _swallows(node)):
        # An exception in a `try` skips the rest of its body.
        yield _lines(node.body)
    elif isinstance(node, ast.BoolOp):
        yield from (_lines([value]) for value in node.values[1:])
    elif isinstance(node, ast.For | ast.While):
        turns = [each.lineno for each in ast.walk(node) if isinstance(each, ast.Continue)]
        if turns:
            yield min(turns) + 1, node.end_lineno or 0


def _lines(nodes: Sequence[ast.stmt | ast.expr]) -> tuple[int, int]:
    return nodes[0].lineno, nodes[-1].end_lineno or 0


def _swallows(node: ast.Try) -> bool:
    """Whether the program goes on after an exception in this `try`."""
    for handler in node.handlers:
        last = handler.body[-1]
        called = ast.unparse(last.value.func) if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) else ""
        if not isinstance(last, ast.Raise) and not _LEAVES.search(called):
            return True
    return False


def _returns_rank(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Return) and node.value is not None and _is_from_rank(node.value, names)


def _is_from_rank(expression: ast.expr, names: set[str]) -> bool:
    """Whether a value comes from get_rank(), RANK, LOCAL_RANK, or one of `names`."""
    if not isinstance(expression, _SIMPLE):
        return False
    called = ast.unparse(expression.func) if isinstance(expression, ast.Call) else ""
    if called and called.split(".")[-1] not in _PASSES_ON:
        return called.split(".")[-1] in _GIVES_RANK or called in names
    for node in ast.walk(expression):
        if isinstance(node, ast.Constant) and node.value in _VARIABLES:
            return True
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in names:
            return True
        if isinstance(node, ast.Call) and node is not expression and _is_from_rank(node, names):
            return True
    return False
