"""Which programs go through things in an order that Python's hash seed decides."""

from __future__ import annotations

import pytest

from ddpkit.launcher.hashseed import orders_by_hash


@pytest.mark.parametrize(
    "program",
    [
        "for name in set(metrics): all_reduce(metrics[name])",
        "names = set(metrics)\nfor name in names: pass",
        "class A:\n    def f(self):\n        self.seen = set()\n        return list(self.seen)",
        "files = list(set(a) - {'b'})",
        "text = ','.join({'a', 'b'})",
        "print(*{'a', 'b'})",
        "first = {name for name in a}.pop()",
        "keys: set[str] = set()\nfor i, key in enumerate(keys): pass",
        "mine = hash(name) % 4 == rank",
        "both = [x for x in frozenset(a)]",
    ],
)
def test_an_order_that_differs_from_process_to_process(program: str) -> None:
    assert orders_by_hash(program)


@pytest.mark.parametrize(
    "program",
    [
        "for name in sorted(set(metrics)): pass",
        "if step in {1, 5} or name in {'a', 'b'}: pass",
        "for step in {1, 5}: pass",
        "count = len(set(names))",
        "seen = set()\nseen.add(1)\nif 2 in seen: pass",
        "sampler.set_epoch(3)\nfor x in loader: pass",
        "stack = [1]\nstack.pop()",
        "no program at all (",
        "",
    ],
)
def test_no_matter(program: str) -> None:
    assert not orders_by_hash(program)
