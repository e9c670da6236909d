"""Says whether a program's order of things depends on Python's hash seed, which forks of one process share."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_SETS = ("set", "frozenset")
_IN_ORDER = ("list", "tuple", "enumerate", "iter", "zip", "map", "filter", "reversed")
_METHODS_IN_ORDER = ("join", "pop", "extend", "fromkeys")


def orders_by_hash(program: str | bytes) -> bool:
    """Whether `program`, Python's text, goes through a set or asks for a hash: of strings, both differ in every process
    unless PYTHONHASHSEED says otherwise. A set that is sorted first, counted, or only asked what it holds is no matter.
    """
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError):
        return False
    named = {ast.unparse(target) for target, value in _assigned(tree) if _is_set(value, set())}
    return any(_is_set(value, named) for value in _taken_in_order(tree)) or any(
        isinstance(node, ast.Call) and ast.unparse(node.func) == "hash" for node in ast.walk(tree)
    )


def _assigned(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value:
            yield node.target, node.value


def _is_set(node: ast.expr, named: set[str]) -> bool:
    if isinstance(node, ast.Set):
        return not all(isinstance(each, ast.Constant) and isinstance(each.value, int | float) for each in node.elts)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in _SETS:
        return True
    if isinstance(node, ast.BinOp):
        return _is_set(node.left, named) or _is_set(node.right, named)
    return isinstance(node, ast.SetComp) or (isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in named)


def _taken_in_order(tree: ast.AST) -> Iterator[ast.expr]:
    """What is gone through one by one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension):
            yield node.iter
        elif isinstance(node, ast.Starred):
            yield node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in _IN_ORDER:
            yield from node.args
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS_IN_ORDER
        ):
            yield from (node.func.value, *node.args)
