"""Bad input: one clear sentence each - what was asked, what was found, what to do - and nothing started."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import free_port

import ddpkit
from ddpkit import JobFailed, LaunchError
from ddpkit.launcher import magic
from ddpkit.machine import devices
from ddpkit.runfolder import wire


def refused(pattern: str, *args: Any, **options: Any) -> None:
    """`launch` refuses with one sentence that matches, and makes no run folder."""
    before = list(Path().glob(".ddpkit/runs/*"))
    with pytest.raises(LaunchError, match=pattern) as caught:
        ddpkit.launch(*args, show=False, **options)
    assert "\n" not in str(caught.value)
    assert list(Path().glob(".ddpkit/runs/*")) == before


def test_missing_script(home: Path) -> None:
    (home / "train.py").write_text("")
    refused(r"there is no script trian\.py in .*; did you mean train\.py\?", "trian.py")
    refused("there is no script elsewhere/x.py", "elsewhere/x.py")
    refused("is a folder; give the script's own path", "./")


def test_missing_module(home: Path) -> None:
    refused("no module 'no.such' can be found from", "no.such")
    refused("target is a int; give a script's path", 3)


@pytest.mark.parametrize("nproc", [0, -1, "two", 10_000, True, 1.5, None])
def test_nproc(script: Callable[..., str], nproc: Any) -> None:
    pattern = {10_000: "10000 ranks asked for on", 0: "at least one rank", -1: "at least one rank"}
    refused(
        pattern.get(nproc, "is not a number of ranks") if nproc is not True else "not a number", script(""), nproc=nproc
    )


def test_nproc_gpu_without_gpus(script: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "all_gpus", list)
    refused("no GPU is visible", script(""), nproc="gpu")


def test_backends(script: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    refused('backend "glooo" is not one of gloo, nccl; did you mean "gloo"', script(""), backend="glooo")
    refused('backend "x" is not one of gloo, nccl; use one of them', script(""), env={wire.ENV_BACKEND: "x"})
    monkeypatch.setattr("ddpkit.launcher.options.torch_has_cuda", lambda: False)
    refused('2 ranks asked for with backend "nccl", but this torch was built without CUDA', script(""), backend="nccl")
    monkeypatch.setattr("ddpkit.launcher.options.torch_has_cuda", lambda: True)
    monkeypatch.setattr(devices, "all_gpus", lambda: [devices.Gpu(0, "GPU-a", "H"), devices.Gpu(1, "GPU-b", "H")])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    asked = r'8 ranks asked for with backend "nccl", but 2 GPUs are visible \(CUDA_VISIBLE_DEVICES=0,1\). Use nproc=2'
    refused(asked, script(""), backend="nccl", nproc=8)


def test_visible_gpus_follow_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [devices.Gpu(i, f"GPU-{c}", "H") for i, c in enumerate("abc")]
    monkeypatch.setattr(devices, "all_gpus", lambda: gpus)
    assert devices.visible_gpus(None) == gpus
    assert devices.visible_gpus("") == []
    assert [g.index for g in devices.visible_gpus("2,0")] == [2, 0]
    assert [g.index for g in devices.visible_gpus("GPU-b")] == [1]
    assert [g.index for g in devices.visible_gpus("1,7,0")] == [1]


def test_near_miss_options(script: Callable[..., str]) -> None:
    refused(r"there is no option nprocs=; did you mean nproc=\?", script(""), nprocs=2)
    refused(
        r"no option learning_rate=; a function's own arguments go in args= and kwargs=", script(""), learning_rate=1
    )
    refused(r"kwargs= goes to a function", script(""), kwargs={"lr": 1})
    refused(r"timeout=-1 is not a time", script(""), timeout=-1)
    refused(r"stall='soon' is not a time", script(""), stall="soon")
    refused(r"max_restarts=-1 is not a count", script(""), max_restarts=-1)
    refused(r"torchrun='--role x' is one string; give a list", script(""), torchrun="--role x")
    with pytest.raises(LaunchError, match="show='loud' is not known"):
        ddpkit.launch(script(""), show="loud")


def test_functions_that_cannot_be_pickled_name_the_variable(home: Path) -> None:
    lock = threading.Lock()

    def captures() -> None:
        print(lock)

    refused("captures cannot be pickled for the ranks, because the captured variable 'lock' cannot", captures)

    def plain(x: Any) -> None:
        print(x)

    refused(r"because args\[0\] cannot", plain, args=[lock])
    refused(r"because kwargs\['x'\] cannot", plain, kwargs={"x": lock})


def test_unwritable_run_folder(script: Callable[..., str], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv(wire.ENV_HOME, str(home / "file"))
    refused(r"the run folder cannot be made in .*/file/runs \(.*\); make room there or allow writing", script(""))


@pytest.mark.job
def test_launch_inside_a_rank_is_refused(script: Callable[..., str]) -> None:
    run = ddpkit.launch(script("import ddpkit\nddpkit.launch('train.py')\n"), show=False, timeout=60)
    assert run.culprit == "every rank"
    assert "called inside rank 0 of a running job" in run.ranks[0].failure.message


@pytest.mark.job
def test_a_launch_guarded_in_a_rank_needs_no_torch_in_the_kernel(script: Callable[..., str]) -> None:
    path = script("print('x')")
    code = f"import ddpkit, sys; ddpkit.launch({path!r}, show=False); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.job
def test_input_and_breakpoint_say_that_there_is_no_keyboard(script: Callable[..., str]) -> None:
    for call in ("input('name? ')", "breakpoint()"):
        run = ddpkit.launch(script(call), show=False, timeout=60)
        assert run.culprit == "every rank"
        assert "the ranks of a job have no keyboard" in run.ranks[1].failure.message


@pytest.mark.job
def test_check_raises_with_the_run(script: Callable[..., str]) -> None:
    with pytest.raises(JobFailed, match="every rank: ZeroDivisionError, line 1: 1 / 0") as caught:
        ddpkit.launch(script("1 / 0"), show=False, timeout=60, check=True)
    assert caught.value.run.state == "failed"


@pytest.mark.job
def test_a_torchrun_that_cannot_start_says_why(script: Callable[..., str]) -> None:
    run = ddpkit.launch(script(""), show=False, timeout=60, torchrun=["--rdzv-backend", "nonsense"])
    assert run.state == "failed" and run.ranks == ()
    assert "torchrun ended before any rank had started" in str(run)
    assert "nonsense" in str(run)


@pytest.mark.job
def test_a_full_disk_leaves_a_truthful_run(home: Path, as_root: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    small = home / "small"
    small.mkdir()
    if not as_root or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)]).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        monkeypatch.setenv(wire.ENV_HOME, str(small))
        (home / "fill.py").write_text("print('x' * 3_000_000, flush=True)\nprint('after')\n")
        run = ddpkit.launch("fill.py", show=False, timeout=60)
        assert run.state == "failed"
        assert any("full" in note for note in run.notes), run.notes
        assert "No space left on device" in str(run)
    finally:
        # What still looks at a file there goes on for a moment: the mount goes when it does.
        subprocess.run(["umount", "--lazy", str(small)], check=True)


# The cell magic.


def magic_refused(pattern: str, line: str, cell: str = "print(1)") -> None:
    with pytest.raises(LaunchError, match=pattern) as caught:
        magic.torchrun(line, cell, {})
    assert "\n" not in str(caught.value)


def test_magic_options(home: Path) -> None:
    magic_refused(r"there is no option --nproc-per-nod; did you mean --nproc-per-node\?", "--nproc-per-nod 2")
    magic_refused(r"--tee cannot be given here: ddpkit keeps the logs", "--tee 3")
    magic_refused(r"there is no option --lr; the script's own options go after --", "--lr 0.1")
    magic_refused(r"--env A is not KEY=VALUE", "--env A")
    magic_refused(r"--as 2x is not a variable name", "--as 2x")
    magic_refused(r"argument --max-restarts.*: invalid int value", "--max-restarts x")
    magic_refused(r"nproc='two' is not a number of ranks", "--nproc_per_node two")
    magic_refused(r"the line cannot be read", "--as 'x")


def test_magic_syntax_error(home: Path) -> None:
    magic_refused(r"line 3 of the cell does not compile \(.*\): b = = 3", "", "a = 1\nb = = 3\n")


@pytest.mark.job
def test_magic_runs_the_cell_and_binds_the_run(home: Path) -> None:
    (home / "helper.py").write_text("word = 'found beside the notebook'\n")
    space: dict[str, Any] = {}
    cell = "import sys, helper\nprint(helper.word, sys.argv[1:])\n"
    magic.torchrun("--nproc_per_node=2 --as mine --quiet --env A=b -- --lr 0.1", cell, space)
    assert space["mine"].ok, str(space["mine"])
    assert space["mine"].ranks[1].stdout == "found beside the notebook ['--lr', '0.1']\n"
    assert "A=b" in space["mine"].command


@pytest.mark.job
def test_the_magic_starts_all_agents_or_one_of_those_that_an_address_joins(home: Path) -> None:
    space: dict[str, Any] = {}
    cell = "import os\nprint(os.environ['GROUP_RANK'], os.environ['WORLD_SIZE'])\n"
    magic.torchrun("--nnodes 2 --nproc-per-node 1 --as both --quiet --timeout 60", cell, space)
    assert sorted(rank.stdout for rank in space["both"].ranks) == ["0 2\n", "1 2\n"]
    address = f"--rdzv-backend c10d --rdzv-endpoint localhost:{free_port()} --rdzv-conf join_timeout=2"
    magic.torchrun(f"--nnodes 2 {address} --nproc-per-node 1 --as alone --quiet --timeout 60", cell, space)
    assert space["alone"].state == "failed" and "RendezvousTimeoutError" in space["alone"].torchrun_log


@pytest.mark.job
def test_the_command_pasted_in_a_shell_gives_the_same_job(home: Path) -> None:
    space: dict[str, Any] = {}
    # In one write: torchrun runs Python with -u, and in a shell both ranks share the stream.
    cell = "import os\nprint(f\"rank {os.environ['RANK']} {__name__}\\n\", end='')\n"
    magic.torchrun("--as mine --quiet", cell, space)
    env = {k: v for k, v in os.environ.items() if k not in (wire.ENV_RUN, "PYTHON_EXEC")}
    done = subprocess.run(space["mine"].command, shell=True, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["rank 0 __main__", "rank 1 __main__"]
