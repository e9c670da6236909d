"""Every failure of the matrix, launched for real: the state, the rank at fault, the sentence and the diagnosis are true."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import RECORDS
from matrix import CASES, Case, untrue

pytestmark = [pytest.mark.job, pytest.mark.usefixtures("warm_process")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_said_of_a_failure_is_true(case: Case, script: Callable[..., str]) -> None:
    if case.since_2_13 and not RECORDS:
        pytest.skip("this torch records no collectives of gloo")
    assert untrue(case, script(case.text)) == ""


def test_there_are_enough_distinct_failures() -> None:
    assert len({case.text for case in CASES}) >= 25
    assert len({case.diagnosis for case in CASES}) >= 20
