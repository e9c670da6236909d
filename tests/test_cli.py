"""`ddpkit run`: torchrun with rank-tagged output, a truthful last line and an exit code that masks nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import free_port

import ddpkit
from ddpkit.runfolder import wire

pytestmark = pytest.mark.job


def ddpkit_run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("ddpkit")), "run", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "100"})


def test_exit_codes_and_the_last_line_tell_the_truth(home: Path) -> None:
    (home / "ends.py").write_text(
        "import sys, time\n"
        "if sys.argv[1] == 'fail': raise ValueError('boom')\n"
        "if sys.argv[1] == 'hang': time.sleep(1000)\n"
        "print(sys.argv[2:])\n"
    )
    passed = ddpkit_run("-n", "2", "ends.py", "pass", "--lr", "0.1")
    assert (passed.returncode, passed.stdout.splitlines()[-1]) == (0, "ends → passed · 2 ranks")
    assert "rank 1 │ ['--lr', '0.1']" in passed.stdout
    failed = ddpkit_run("-n", "2", "ends.py", "fail")
    assert failed.returncode == 1
    assert "ends → failed · 2 ranks · every rank: ValueError, line 2" in failed.stdout
    hung = ddpkit_run("-n", "2", "--timeout", "6", "ends.py", "hang")
    assert (hung.returncode, "longer than timeout=6 s and was ended" in hung.stdout) == (124, True)


def test_what_cannot_be_started_is_one_sentence_and_exit_code_2(home: Path) -> None:
    for words, sentence in (
        (["-n", "two", "x.py"], "nproc='two' is not a number of ranks"),
        (["x.py"], "there is no script x.py in"),
        (["-m", "no.such"], "no module 'no.such' can be found"),
    ):
        done = ddpkit_run(*words)
        assert done.returncode == 2
        assert sentence in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_a_module_runs(home: Path) -> None:
    (home / "tool.py").write_text("print('as', __name__)\n")
    done = ddpkit_run("-n", "1", "-m", "tool")
    assert "rank 0 │ as __main__" in done.stdout


def test_torchruns_long_form_of_one_node_works_and_is_needless(home: Path) -> None:
    (home / "where.py").write_text("import os\nprint(os.environ['MASTER_ADDR'], os.environ['WORLD_SIZE'])\n")
    long = ["--nnodes=1", "--node-rank=0", "--master-addr=localhost", f"--master-port={free_port()}"]
    explicit = ddpkit.launch("where.py", torchrun=long, show=False, timeout=60)
    plain = ddpkit.launch("where.py", show=False, timeout=60)
    assert explicit.ok and plain.ok
    assert explicit.ranks[1].stdout == plain.ranks[1].stdout == "localhost 2\n"


def test_ddp_backend_in_the_environment_decides(home: Path) -> None:
    (home / "b.py").write_text(
        "from ddpkit.rank import setup, report\nwith setup() as here: report(backend=here.backend)\n"
    )
    run = ddpkit.launch("b.py", env={wire.ENV_BACKEND: "gloo"}, show=False, timeout=60)
    assert run.backend == "gloo" and run.reported[1]["backend"] == "gloo"
