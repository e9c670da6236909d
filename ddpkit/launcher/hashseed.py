"""Finds programs whose order of execution depends on Python's hash seed; processes forked from one parent share it."""

from __future__ import annotations

import ast

_SETS = ("set", "frozenset")
_IN_ORDER = ("list", "tuple", "enumerate", "iter", "zip", "map", "filter", "reversed")
_METHODS_IN_ORDER = ("join", "pop", "extend", "fromkeys")


def orders_by_hash(program: str | bytes) -> bool:
    """Whether the source `program` iterates over a set or calls `hash`.

    For strings, both differ between processes unless PYTHONHASHSEED is set. Sorting a set first, taking its length or
    testing membership does not count.
    """
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError):
        return False
    nodes = list(ast.walk(tree))
    named = set()
    for node in nodes:
        if isinstance(node, ast.Assign) and _is_set(node.value, set()):
            named |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value and _is_set(node.value, set()):
            named.add(ast.unparse(node.target))
    return any(_asks_for_hash(node) or any(_is_set(each, named) for each in _taken_in_order(node)) for node in nodes)


def _asks_for_hash(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "hash"


def _is_set(node: ast.expr, named: set[str]) -> bool:
    if isinstance(node, ast.Set):
        return not all(isinstance(each, ast.Constant) and isinstance(each.value, int | float) for each in node.elts)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in _SETS:
        return True
    if isinstance(node, ast.BinOp):
        return _is_set(node.left, named) or _is_set(node.right, named)
    return isinstance(node, ast.SetComp) or (isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in named)


def _taken_in_order(node: ast.AST) -> list[ast.expr]:
    """The expressions that this node iterates over."""
    if isinstance(node, ast.For | ast.comprehension):
        return [node.iter]
    if isinstance(node, ast.Starred):
        return [node.value]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in _IN_ORDER:
        return node.args
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS_IN_ORDER:
        return [node.func.value, *node.args]
    return []
