"""The failing jobs, launched for real: what the recorder, the watcher and the verdict say together is true."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import RECORDS
from jobs import Job, jobs, launched, untrue

pytestmark = [pytest.mark.job, pytest.mark.usefixtures("warm_process")]
LIVE = [job for job in jobs() if job.live]


@pytest.mark.parametrize("job", LIVE, ids=lambda job: job.name)
def test_what_is_said_of_a_failure_is_true(job: Job, home: Path) -> None:
    if job.needs_record and not RECORDS:
        pytest.skip("this torch records no collectives of gloo")
    assert untrue(job, launched(job, home)) == ""
