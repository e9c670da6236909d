"""Checkpoints that are whole or not there, and weights of whichever layout."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ddpkit
from ddpkit import Run
from ddpkit.rank.saving.checkpoint import CheckpointError, checked
from ddpkit.rank.saving.weights import WeightsError, load_weights

Script = Callable[..., str]

PREAMBLE = """
import logging, os, random, resource, sys
import numpy as np
import torch
from ddpkit.rank import Checkpoints, report, setup

logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
draw = lambda: [random.random(), float(np.random.rand()), float(torch.rand(1))]
"""


def launch(path: str, **options: Any) -> Run:
    return ddpkit.launch(path, show=False, **{"timeout": 120, "backend": "gloo", **options})


@pytest.mark.job
def test_what_is_saved_comes_back_and_what_is_broken_is_skipped(script: Script, home: Path) -> None:
    saved = launch(
        script(
            PREAMBLE
            + """
with setup() as here:
    torch.manual_seed(here.rank)
    checkpoints = Checkpoints("kept", here, keep=2)
    for step in (10, 20, 30):
        checkpoints.save(step, {"model_state": {"w": torch.full((2,), float(step))}}, {"loader": {"batch": step + here.rank}})
    report(drawn=draw())
"""
        )
    )
    assert saved.ok, str(saved)
    assert sorted(p.name for p in (home / "kept").iterdir()) == ["step_00000020", "step_00000030"]
    told = json.loads((home / "kept" / "step_00000030" / "complete.json").read_text())
    assert (told["step"], told["world_size"], sorted(told["files"])) == (30, 2, ["model.pt", "rank_0.pt", "rank_1.pt"])

    load = (
        PREAMBLE
        + """
with setup() as here:
    checkpoints = Checkpoints("kept", here)
    found = checkpoints.newest()
    shared, own = checkpoints.load(found) if found else ({}, {})
    report(step=found and found.step, w=shared.get("model_state", {}).get("w"), own=own, drawn=draw())
"""
    )
    again = launch(script(load, "load.py"))
    assert [r["step"] for r in again.reported.values()] == [30, 30]
    assert [r["own"] for r in again.reported.values()] == [{"loader": {"batch": 30}}, {"loader": {"batch": 31}}]
    assert [r["drawn"] for r in again.reported.values()] == [r["drawn"] for r in saved.reported.values()]

    other_ranks = launch(script(load, "load.py"), nproc=3)
    assert [r["own"]["loader"]["batch"] for r in other_ranks.reported.values()] == [30, 30, 30]
    assert "was written by 2 ranks, and these are 3" in other_ranks.ranks[2].stdout

    half = home / "kept" / "step_00000030" / "rank_1.pt"
    half.write_bytes(half.read_bytes()[:100])
    older = launch(script(load, "load.py"))
    assert [r["step"] for r in older.reported.values()] == [20, 20] and older.reported[0]["w"] == [20.0, 20.0]
    assert older.ranks[0].stdout.startswith("checkpoint step_00000030 is skipped: rank_1.pt has 100 bytes of ")
    (home / "kept" / "step_00000020" / "complete.json").unlink()
    assert [r["step"] for r in launch(script(load, "load.py")).reported.values()] == [None, None]


@pytest.mark.job
def test_a_rank_that_cannot_write_drops_the_checkpoint_for_all_and_one_killed_leaves_no_half(
    script: Script, home: Path
) -> None:
    run = launch(
        script(
            PREAMBLE
            + """
with setup() as here:
    checkpoints = Checkpoints("kept", here)
    state = {"model_state": {"w": torch.zeros(1000)}}
    first = checkpoints.save(1, state, {})
    if here.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, -1))
    second = checkpoints.save(2, state, {})
    if here.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    report(first=str(first), second=str(second), there=sorted(os.listdir("kept")))
    torch.distributed.barrier()
    if here.rank == 1:
        # In the middle of its file: the first bytes are written, the last never are.
        torch.save = lambda state, file: (file.write(b"half"), file.flush(), os.kill(os.getpid(), 9))
    checkpoints.save(3, state, {})
"""
        )
    )
    assert (run.state, run.culprit, run.ranks[1].signal) == ("failed", 1, signal.SIGKILL.name), str(run)
    assert run.reported[0]["first"] == run.reported[1]["first"] == "kept/step_00000001"
    assert run.reported[0]["second"] == run.reported[1]["second"] == "None"
    assert run.reported[0]["there"] == ["step_00000001"]
    for rank in run.ranks:
        assert "checkpoint of step 2 dropped: rank 1 could not write: [Errno 27] File too large" in rank.stdout
    assert sorted(p.name for p in (home / "kept").iterdir()) == ["step_00000001", "step_00000003.part"]


def test_a_changed_byte_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "step_00000001"
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"no readable complete\.json, so its writing was not finished"):
        checked(folder)
    (folder / "complete.json").write_text('{"files": {"model.pt": {"bytes": 3, "blake2b": "00"}}}')
    with pytest.raises(CheckpointError, match=r"model\.pt is missing"):
        checked(folder)
    (folder / "model.pt").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match=r"model\.pt is not as it was written \(another hash\)"):
        checked(folder)


# Weights.


class Nested(torch.nn.Module):
    """A model with a submodule that is itself named `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 2)
        self.head = torch.nn.Linear(2, 1)


def prefixed(weights: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {prefix + name: value for name, value in weights.items()}


@pytest.mark.parametrize("make", [lambda: torch.nn.Sequential(torch.nn.Linear(2, 2)), Nested])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module.", "module._orig_mod."])
@pytest.mark.parametrize("layout", ["", "model_state", "model_state_dict", "state_dict", "model"])
def test_weights_of_every_layout(tmp_path: Path, make: Callable[[], torch.nn.Module], prefix: str, layout: str) -> None:
    torch.manual_seed(0)
    written, model = make(), make()
    weights = prefixed(written.state_dict(), prefix)
    torch.save({layout: weights, "epoch": 3} if layout else weights, tmp_path / "file.pt")
    rest = load_weights(tmp_path / "file.pt", model)
    assert rest == ({"epoch": 3} if layout else {})
    for name, value in written.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_weights_that_cannot_be_loaded_are_told_in_one_sentence(tmp_path: Path) -> None:
    file, model = tmp_path / "file.pt", torch.nn.Linear(2, 2)
    with pytest.raises(WeightsError, match=r"there is no file .*file\.pt"):
        load_weights(file, model)
    torch.save({"epoch": 3}, file)
    with pytest.raises(WeightsError, match=r"holds no weights: it has epoch"):
        load_weights(file, model)
    torch.save(torch.nn.Linear(3, 2).state_dict(), file)
    with pytest.raises(WeightsError, match=r"(?s)are of another model.*size mismatch for weight"):
        load_weights(file, model)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match=r"is not whole: "):
        load_weights(file, model)
    file.write_bytes(b"")
    with pytest.raises(WeightsError, match=r"is not whole: "):
        load_weights(file, model)
    torch.save({"model_state": model.state_dict(), "args": argparse.Namespace(lr=0.1)}, file)
    with pytest.raises(
        WeightsError, match=r"holds more than tensors and plain values.*argparse\.Namespace.*trust=True"
    ):
        load_weights(file, model)
    assert load_weights(file, model, trust=True)["args"].lr == 0.1
