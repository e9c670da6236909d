"""The day on one GPU, shortened and without one: its steps end with their limits, and its zip becomes clean recordings."""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import ddpkit
from ddpkit.course import lab
from ddpkit.diagnosis.pages import NoSuchPage
from ddpkit.runfolder import wire

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import gpu_day  # noqa: E402
import gpu_kit  # noqa: E402
import gpu_setup  # noqa: E402
import take_gpu_day  # noqa: E402
from gpu_plan import ENVIRONMENTS, FIRST, REST, Step  # noqa: E402

# A step that goes on for ever, and has a process in a session of its own.
HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(1000)
"""
PLACES = {"/root": "/home/you", "/root/day": "/home/you/gpu-day", "node7": "host", "6.1.0-cloud": "kernel"}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, cwd=ROOT)


@pytest.mark.job
def test_the_day_leaves_recordings_that_can_be_shown(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    day = run(
        "tools/gpu_day.py", str(home / "out"), "--dry", "--only", "versions,two_refused,unused_parameters,memory_real"
    )
    assert day.returncode == 0 and "4 of 4 steps done." in day.stdout, day.stdout + day.stderr
    found = home / "out" / "gpu-day.zip"
    with zipfile.ZipFile(found) as archive:
        assert archive.testzip() is None
        steps = {name.partition("/")[0] for name in archive.namelist() if name.endswith("/step.json")}
        assert json.loads(archive.read("memory_real/step.json"))["seen"] == "needs a GPU"
    assert steps == {"versions", "two_refused", "unused_parameters", "memory_real"}
    refused = run("tools/take_gpu_day.py", str(found))
    assert refused.returncode == 1 and "this is of a dry run, which recorded nothing of a GPU" in refused.stderr
    taken = run("tools/take_gpu_day.py", str(found), "--into", str(home / "taken"))
    assert taken.returncode == 0, taken.stderr
    assert "**A dry run: nothing here is of a GPU.**" in (home / "taken" / "docs" / "gpu.md").read_text()
    monkeypatch.setattr(lab, "CATALOG", home / "taken" / "ddpkit" / "catalog")
    recorded = ddpkit.on_gpu("unused_parameters")
    assert recorded is not None and recorded.culprit == "every rank" and recorded.script
    assert recorded.notes[0].startswith("recorded on a machine without a GPU, torch ")
    assert recorded.notes[0].endswith("; CPU, gloo")
    held = "".join(path.read_text(errors="replace") for path in recorded.folder.rglob("*") if path.is_file())
    for own in (str(ROOT), sys.prefix, os.uname().nodename, str(Path.home())):
        assert not take_gpu_day.as_a_word(own).search(held), f"the recording holds {own}"


@pytest.fixture
def a_day(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], gpu_day.Day]:
    """A day of so many seconds, whose steps need no torch."""
    monkeypatch.setattr(gpu_setup, "WAKE", "")
    asked = {"out": str(home), "dry": True, "first": False}
    return lambda limit_s: gpu_day.Day(argparse.Namespace(limit_s=limit_s, **asked))


ADay = Callable[[float], gpu_day.Day]


@pytest.mark.job
def test_a_step_that_hangs_costs_its_own_limit_and_leaves_nothing(home: Path, a_day: ADay) -> None:
    (home / "hangs.py").write_text(HANGS)
    (home / "says.py").write_text("print('here')")
    (home / "breaks.py").write_text("raise OSError('no such device')")
    steps = [Step(name, 1, name, name, (str(home / name), name), 2) for name in ("hangs", "says", "breaks")]
    day = a_day(60)
    day.run(tuple(steps))
    states = {row["name"]: row["state"] for row in day.rows}
    assert states == {"hangs": "ended at its limit of 2 s", "says": "done", "breaks": "failed: exit code 1"}
    with zipfile.ZipFile(day.zip) as archive:
        pid = int(archive.read("hangs/output.txt"))
        assert "no such device" in json.loads(archive.read("breaks/step.json"))["seen"]
    assert not Path(f"/proc/{pid}").exists() or b"sleep" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert "1 of 3 steps done." in day.end() and not day.work.exists()


def test_a_step_that_no_longer_fits_is_left_out_aloud(a_day: ADay, capsys: pytest.CaptureFixture[str]) -> None:
    day = a_day(1)
    day.run((REST[0],))
    assert day.rows[0]["state"] == "not run: no time left"
    assert "versions: not run: no time left" in capsys.readouterr().out
    assert "0 of 1 steps done." in day.end()


def test_without_a_healthy_pair_the_steps_of_pairs_are_left_out(a_day: ADay) -> None:
    by_name = {step.name: step for step in REST}
    day = a_day(60)
    day._go_by(by_name["healthy"], "done", {"exitcode": 0, "settings": {"NCCL_MAX_NCHANNELS": "1"}})
    assert day.settings["sockets"] == {"NCCL_MAX_NCHANNELS": "1"} and not day._why_not(by_name["peer_lost"])
    day._go_by(by_name["healthy"], "failed: exit code 1", {})
    assert day._why_not(by_name["peer_lost"]) == "not run: a healthy job of two NCCL ranks on one GPU did not pass"
    assert not day._why_not(by_name["train_bf16"])
    day.work.rmdir()


def test_the_plan_holds_together() -> None:
    for plan in (FIRST, REST):
        assert len({step.name for step in plan}) == len(plan)
        for step in plan:
            assert step.environment in ENVIRONMENTS
            source = (ROOT / "tools" / "gpu_steps" / f"{step.words[0]}.py").read_text()
            assert f"def {step.name}(" in source or f"{step.name} = " in source, step.name
    assert FIRST[0].name == REST[0].name == "versions"


def test_what_tells_of_the_machine_is_taken_out() -> None:
    gpu = "GPU-0a1b2c3d-1111-2222-3333-444455556666"
    text = f"node7: /root/day/run.py, /rootfs, node70, root cause, 6.1.0-cloud, {gpu} at 10.1.2.3"
    assert take_gpu_day.cleaned(text, PLACES) == (
        "host: /home/you/gpu-day/run.py, /rootfs, node70, root cause, kernel, GPU-0 at 192.0.2.1"
    )


def test_of_a_step_in_two_zips_the_one_that_was_done_is_taken() -> None:
    def taken(state: str, seen: str) -> take_gpu_day.Taken:
        return take_gpu_day.Taken({"name": "a", "number": 1, "state": state, "seen": seen}, {}, {})

    done, failed = taken("done", "first"), taken("failed: exit code 1", "second")
    assert take_gpu_day.merged([[done], [failed]]) == [done]
    assert take_gpu_day.merged([[failed], [done]]) == [done]
    assert take_gpu_day.merged([[done], [again := taken("done", "again")]]) == [again]


def test_the_code_of_other_gpus_is_blanked_out(tmp_path: Path) -> None:
    def entry(architecture: int, code: bytes) -> bytes:
        return struct.pack("<HHIQIIHHI", 2, 0, 64, len(code), 0, 0, 0, 0, architecture).ljust(64, b"\0") + code

    entries = entry(80, b"old code") + entry(90, b"own code") + entry(120, b"new code")
    fat = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    code = bytearray(b"linking!" + fat + bytes(16))
    spans = gpu_kit.blank_spans(code, {"__nv_relfatbin": (0, 8), ".nv_fatbin": (8, len(fat) + 16)})
    assert [bytes(code[at : at + size]) for at, size in spans] == [b"linking!", b"old code", b"new code"]


def test_the_kit_has_a_pin_for_each_wheel() -> None:
    pinned = gpu_kit.pinned(gpu_kit.LACKING)
    assert all(version for _, _, version in (each.partition("==") for each in pinned)) and len(pinned) == len({*pinned})
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {"anywidget", "ipywidgets", "ipykernel", "py-spy"} <= {*gpu_kit.LACKING} <= {*gpu_kit.LACKING, *needed}


# What a reader sees of it.


def test_a_failure_that_was_not_recorded_yet_is_a_sentence(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ddpkit.on_gpu("straggler") is None
    assert capsys.readouterr().out == "straggler: no run on a GPU has been recorded yet.\n"
    with pytest.raises(NoSuchPage, match=r"on_gpu: the catalog has no failure 'stragler'\. Did you mean straggler"):
        ddpkit.on_gpu("stragler")
    with pytest.raises(NoSuchPage, match=r"no failure 'x'\. `ddpkit explain` lists all\."):
        ddpkit.on_gpu("x")


@pytest.mark.parametrize("bundle", sorted((ROOT / "ddpkit" / "catalog").glob("*/gpu.zip")), ids=lambda p: p.parent.name)
def test_every_recording_says_where_it_was_made(home: Path, bundle: Path) -> None:
    recorded = ddpkit.on_gpu(bundle.parent.name)
    assert recorded is not None and recorded.notes[0].startswith("recorded on one ")
    assert any(recorded.notes[0].endswith(f"; {where}") for where in ENVIRONMENTS.values() if where)
    assert wire.read_record(recorded.folder / wire.JOB)
