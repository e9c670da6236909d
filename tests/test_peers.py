"""During which calls a collective came, and which of these had waited for its end."""

from __future__ import annotations

import time
from collections import deque

import pytest

from ddpkit.recorder import messages


@pytest.fixture(autouse=True)
def no_calls_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_called", deque())


@pytest.mark.parametrize(
    ("error", "asked", "waited"),
    [
        (None, {}, True),
        (RuntimeError("Connection closed by peer"), {}, True),
        (TimeoutError("an alarm of the program's own"), {}, False),
        (KeyboardInterrupt(), {}, False),
        (None, {"async_op": True}, False),
    ],
    ids=["it ended", "it failed", "an alarm broke it off", "a signal broke it off", "nobody waits"],
)
def test_a_call_has_waited_until_its_collective_ended_or_failed(
    error: BaseException | None, asked: dict[str, object], waited: bool
) -> None:
    call = messages.begin_call("all_reduce", asked)
    assert not call.waited
    call.end(error)
    assert call.waited == waited


def test_a_collective_came_during_each_call_that_was_not_over_by_then() -> None:
    """Of two threads that call at once, either may be the one."""
    over, main, beside = (messages.begin_call("all_reduce", {}) for _ in range(3))
    over.end()
    created_ns = time.time_ns() + 1
    main.over_ns = created_ns + 1
    assert messages.calls()("all_reduce", created_ns) == [main, beside]
    assert messages.calls()("broadcast", created_ns) == []


def test_one_of_objects_is_the_outermost_of_its_calls() -> None:
    objects = messages.begin_call("all_gather_object", {})
    inner = messages.begin_call("all_gather", {})
    assert messages.calls()("all_gather", time.time_ns() + 1) == [objects, inner]
