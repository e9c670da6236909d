"""Programs of hydra, Accelerate and Lightning: the same result by torchrun, cold and warm, and the truth when one breaks."""

import re
import subprocess
from pathlib import Path

import pytest

import ddpkit

PROGRAMS = {"hydra": "+wrong=7", "accelerate": "--wrong", "lightning": "--wrong"}

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize("library", PROGRAMS)
def test_a_program_of_a_library_learns_the_same_and_breaks_where_it_is_broken(library: str, home: Path) -> None:
    pytest.importorskip(library, reason="`make soak` installs it")
    program = Path(__file__).parent / "libraries" / f"{library}_train.py"
    plain = subprocess.run(
        ["torchrun", "--standalone", "--nproc-per-node", "2", program],
        cwd=home,
        capture_output=True,
        text=True,
        check=True,
    )
    (result,) = set(learned(plain.stdout))
    for warm in (False, True, True):
        run = ddpkit.launch(program, warm=warm, show=False, timeout=300).check()
        assert [learned(rank.stdout) for rank in run.ranks] == [[result], [result]]
    broken = ddpkit.launch(program, args=[PROGRAMS[library]], show=False, timeout=300)
    assert broken.state == "failed" and broken.culprit == 1 and broken.diagnosis.name == "own_exception"
    assert "is out of bounds" in str(broken) and "cross_entropy" in str(broken)


def learned(text: str) -> list[str]:
    return re.findall(r"learned (\S+)", text)
