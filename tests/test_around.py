"""Which `if` about the rank, and which loops, a line of a program stands under."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpkit.recorder.source import about_rank, choice, loops, may_return_before, may_swallow

PROGRAM = """\
if step == 4:
    evaluate()
if here.rank == 0:
    save()
    if step:
        barrier()
else:
    wait()
for epoch in range(3):
    if is_main_process() and epoch:
        log()
    train()
"""


@pytest.mark.parametrize(
    ("line", "test"),
    [
        (2, ""),
        (4, "if here.rank == 0"),
        (6, "if here.rank == 0"),
        (8, "else of if here.rank == 0"),
        (11, "if is_main_process() and epoch"),
        (12, ""),
        (99, ""),
    ],
)
def test_the_innermost_if_about_the_rank_is_found(tmp_path: Path, line: int, test: str) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    assert about_rank(str(tmp_path / "train.py"), line) == test


@pytest.mark.parametrize(
    ("test", "is_about_it"),
    [
        ("self.main and step > 0", True),
        ("writer is not None", True),
        ("args.coordinator", True),
        ("main(args)", False),
        ("__name__ == '__main__'", False),
        ("writer.closed", False),
        ("domain == 'news'", False),
    ],
)
def test_what_one_rank_alone_is_or_has_tells_of_the_rank(tmp_path: Path, test: str, is_about_it: bool) -> None:
    (tmp_path / "train.py").write_text(f"if {test}:\n    log()\n")
    assert bool(about_rank(str(tmp_path / "train.py"), 2)) is is_about_it


def test_the_loops_around_a_line_are_found_the_innermost_first(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("for epoch in range(2):\n    while True:\n        step()\n    evaluate()\nsave()\n")
    found = [[loop.rpartition(":")[2] for loop, *_ in loops(str(file), line)] for line in (3, 4, 5)]
    assert found == [["2", "1"], ["1"], []]


CHOSEN = """\
for epoch in range(2):
    for step in range(3):
        train()
    if epoch:
        for part in parts:
            evaluate(part)
    if late and agreed():
        break
    save(here or
         there())
    try:
        again()
    except OSError:
        retry()
    match kind:
        case 1:
            one()
    mean = (own if epoch else
            agree())
    for callback in callbacks:
        callback.on_epoch_end()
        mean = callback(mean)
        net(callback).sum().backward()
        getattr(callback, "on_end")()
"""


@pytest.mark.parametrize(
    ("line", "by", "always"),
    [
        (3, 0, [True, True]),
        (6, 4, [True, False]),
        (7, 7, [False]),
        (9, 0, [True]),
        (10, 9, [False]),
        (12, 11, [False]),
        (14, 13, [False]),
        (17, 16, [False]),
        (19, 18, [False]),
        (21, 20, [False, False]),
        (22, 0, [True, True]),
        (23, 0, [True, True]),
        (24, 20, [False, False]),
    ],
)
def test_whether_every_turn_of_a_loop_comes_to_a_line(tmp_path: Path, line: int, by: int, always: list[bool]) -> None:
    file = tmp_path / "train.py"
    file.write_text(CHOSEN)
    assert choice(str(file), line) == by
    assert [loop.always for loop in loops(str(file), line)] == always


@pytest.mark.parametrize(
    ("loop", "whole"),
    [
        ("for batch in loader:", True),
        ("for batch in loader:\n    for part in batch:\n        prepare(part)", True),
        ("while next(it):", False),
        ("for step in range(0, len(rows), 8):", True),
        ("for step in range(start, steps):", False),
        ("for label in sorted(set(labels.tolist())):", False),
        ("for label in sorted(self.seen):", False),
        ("for file in sorted(files):", True),
        ("for name, total in totals.items():", False),
        ("for name, batch in batches.items():", True),
        ("for batch in loader:\n    model.no_sync()", False),
        ("for batch in loader:\n    if done():\n        break", False),
        ("for batch in loader:\n    if not batch:\n        continue", False),
        ("for batch in loader:\n    if not batch:\n        return", False),
        ("for batch in loader:\n    try:\n        read()\n    except OSError:\n        pass", False),
    ],
)
def test_whether_a_loop_goes_on_to_the_end_of_what_it_goes_through(tmp_path: Path, loop: str, whole: bool) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"{loop}\n    train(batch)\n" if loop.startswith("for") else f"{loop}\n    train()\n")
    last = len(file.read_text().splitlines())
    assert [found.to_the_end for found in loops(str(file), last)] == [whole]


RETURNS = """\
def validate(rows):
    if not rows:
        return None
    return agree(rows)

def train(loader):
    for batch in loader:
        if not batch:
            continue
        step(batch)
    agree()
"""


@pytest.mark.parametrize(("line", "may"), [(2, False), (4, True), (9, False), (10, False), (11, False), (99, False)])
def test_whether_a_function_may_return_before_it_comes_to_a_line(tmp_path: Path, line: int, may: bool) -> None:
    file = tmp_path / "train.py"
    file.write_text(RETURNS)
    assert may_return_before(str(file), line) == may
    assert (choice(str(file), line) == 9) == (line == 10), "a turn may be cut short before it"


CATCHES = """\
try:
    swallowed()
except (OSError, ValueError):
    log()
finally:
    clean_up()
try:
    passed_on()
except OSError:
    log()
    raise
except KeyboardInterrupt:
    log()
except Exception:
    sys.exit(1)
"""


@pytest.mark.parametrize(("line", "may"), [(2, True), (4, False), (6, False), (8, False), (99, False)])
def test_whether_what_a_line_raises_may_be_swallowed(tmp_path: Path, line: int, may: bool) -> None:
    (tmp_path / "train.py").write_text(CATCHES)
    assert may_swallow(str(tmp_path / "train.py"), line) == may


def test_without_a_source_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("if rank == 0\n    pass")
    assert about_rank(str(tmp_path / "broken.py"), 2) == about_rank(str(tmp_path / "none.py"), 1) == ""
