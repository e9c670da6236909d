"""The bench without its buttons: what it edits, runs and compares, and what it says when asked for something else."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_for
from IPython.core.interactiveshell import InteractiveShell

import ddpkit
from ddpkit.course.bench_view import BenchView, diff
from ddpkit.course.lab import Lab, NoSuchLab, labs, patched
from ddpkit.course.lab import lab as find_lab
from ddpkit.errors import LaunchError
from ddpkit.runfolder import wire

OWN = """
import os, sys
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from beside import WIDTH
from ddpkit.rank import setup

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.aux = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.body(x) if "--no-aux" in sys.argv else self.aux(self.body(x))

with setup() as here:
    print(f"{here.world_size} ranks, MY={os.environ.get('MY')}, {sys.argv[1:]}")
    ddp = DDP(Net())
    for _ in range(3):
        ddp(torch.ones(2, WIDTH)).sum().backward()
"""

NAME = "unused_parameters"
PROGRAM = find_lab(NAME).program


@pytest.mark.parametrize("lab", [lab for lab in labs() if "darwin" not in lab.platforms], ids=lambda lab: lab.name)
def test_where_a_lab_cannot_be_had_its_bench_holds_a_recorded_run(
    home: Path, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    bench = ddpkit.FixBench(lab.name)
    (shown,) = bench.results
    assert shown.tried == "as it is, recorded on Linux"
    assert (shown.run.culprit, shown.run.diagnosis and shown.run.diagnosis.name) == (lab.culprit, lab.page or lab.name)
    assert shown.run.script == lab.program, "the lab was changed: make record"
    with pytest.raises(LaunchError, match=f"{lab.name} can be run on linux; this is darwin"):
        bench.run()


def test_every_lab_is_whole() -> None:
    for lab in labs():
        assert lab.expect in ("fails", "hangs", "silent", "slow"), lab.name
        assert len(lab.remedies) >= 2, lab.name
        assert patched(lab.program, [*lab.remedy(lab.plain).edits, *lab.reference])
        for remedy in lab.remedies:
            assert len(remedy.title) <= 64 and remedy.title[-1] not in ".!", f"{lab.name}: {remedy.title}"
            assert remedy.edits or remedy.env, f"{lab.name}.{remedy.name} changes nothing"
            assert not remedy.edits or patched(lab.program, remedy.edits) != lab.program
            assert (
                remedy.ends in {"cure": [""], "costly": [""], "decoy": ["fails", "hangs", "wrong", "slow"]}[remedy.kind]
            )


def test_the_diff_is_numbered_escaped_and_folded() -> None:
    before = "\n".join(f"line {i}" for i in range(1, 30))
    shown = diff(before, before.replace("line 20\n", "a < b\nc\n"))
    assert '<tr class="old"><td class="n">20</td><td class="n">−</td><td>line 20</td>' in shown
    assert '<tr class="new"><td class="n">21</td><td class="n">+</td><td>c</td>' in shown
    assert "a &lt; b" in shown and "<summary>16 lines</summary>" in shown
    assert '<td class="n">22</td><td class="n"> </td><td>line 21</td>' in shown


def test_what_the_bench_does_not_have_is_told_with_what_is_near() -> None:
    with pytest.raises(NoSuchLab, match=r"no lab 'unused_parameter'\. Did you mean unused_parameters"):
        ddpkit.FixBench("unused_parameter")
    with pytest.raises(LaunchError, match="int is neither the name of a lab nor a run"):
        ddpkit.FixBench(3)  # type: ignore[arg-type]
    bench = ddpkit.FixBench(NAME)
    with pytest.raises(LaunchError, match="there is no remedy 'frieze'; did you mean 'freeze'"):
        bench.run("frieze")
    with pytest.raises(
        LaunchError, match="predict='yes' is not known; use 'cures', 'fails', 'hangs', 'passes but wrong'"
    ):
        bench.run("freeze", predict="yes")
    with pytest.raises(LaunchError, match="names of remedies or edit="):
        bench.run("freeze", edit="print()")
    with pytest.raises(LaunchError, match="nothing to compare yet"):
        bench.compare()
    assert bench.results == ()


@pytest.mark.job
def test_a_readers_own_run_is_edited_with_its_edits_in_it(script: Callable[..., str]) -> None:
    own = PROGRAM.replace("nn.Linear(32, 1)", "nn.Linear(32, 1, bias=False)")
    bench = ddpkit.FixBench(ddpkit.launch(script(own), show=False, timeout=60))
    assert bench.lab.name == NAME and "bias=False" in bench.script
    assert bench.run("freeze").cures
    other = own.replace("DDP(Net().to(here.device))", "DDP( Net().to(here.device) )")
    bench = ddpkit.FixBench(ddpkit.launch(script(other), show=False, timeout=60))
    assert not bench.fits("freeze") and bench.fits("barrier") and bench.fits("find_unused")
    with pytest.raises(LaunchError, match="an edit does not fit: is not in the script: ddp = DDP"):
        bench.run("freeze")
    mended = other.replace("x = self.body(x).relu()", "x = self.middle(self.body(x).relu())")
    result = bench.run(edit=mended, predict="cures")
    # Its plain run cannot be made of this script, so there is no one process to compare with.
    assert result.cells[:3] == ("your own edit", "cures", "cures") and result.cells[4] == "not compared"


@pytest.mark.job
def test_a_run_that_passed_needs_a_lab_to_be_named(script: Callable[..., str]) -> None:
    passed = ddpkit.launch(script("print('fine')"), show=False, timeout=60)
    with pytest.raises(LaunchError, match="train has no diagnosis to choose a lab by; name one: lab="):
        ddpkit.FixBench(passed)


@pytest.mark.job
def test_results_hold_nothing_that_varies(home: Path) -> None:
    first, second = ddpkit.FixBench(NAME), ddpkit.FixBench(NAME)
    for bench in (first, second):
        bench.run(predict="fails")
        bench.run("freeze", "barrier")
        bench.run("catch")
    assert repr(first.results) == repr(second.results)
    assert first.results.html == second.results.html
    assert [r.cures for r in first.results] == [False, True, False]
    assert first.results[1].tried == "Freeze the layer before the wrap + A barrier in every step"
    assert 0.01 < first.results[0].apart_by_step[0] < 1
    assert first.results[0].cells[-1].startswith("every rank raised RuntimeError, line 29: loss = ")
    assert first.results[2].cells[-1] == "exit codes 0 0"
    figure = first.compare()
    assert figure.png()[:4] == b"\x89PNG" and "Catch the error" in figure.alt


@pytest.mark.job
def test_a_prediction_made_while_a_run_goes_on_is_kept_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ddpkit.FixBench(NAME)
    started, may_end, predicted = threading.Event(), threading.Event(), []

    def run(*names: str, predict: str, **_: object) -> None:
        predicted.append(predict)
        started.set()
        may_end.wait()

    monkeypatch.setattr(bench, "run", run)
    view = BenchView(bench)
    view._prediction.value = "cures"
    view._run.click()
    started.wait()
    assert view._prediction.value is None and view._run.disabled
    view._prediction.value = "hangs"
    assert view._run.disabled and "a run goes on" in view._why_not.value
    may_end.set()
    wait_for(lambda: not view._run.disabled, 60)
    assert view._prediction.value == "hangs" and predicted == ["cures"]


def test_the_remedies_are_shuffled_alike_for_the_same_reader(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = [r.name for r in find_lab(NAME).remedies]
    orders = []
    for reader in ("7", "7", "8"):
        monkeypatch.setenv(wire.ENV_SEED, reader)
        orders.append([r.name for r in ddpkit.FixBench(NAME).remedies])
    assert orders[0] == orders[1] != orders[2] and catalog not in orders and sorted(orders[2]) == sorted(catalog)


def test_why_the_button_is_disabled_stands_beside_it(home: Path) -> None:
    view = BenchView(ddpkit.FixBench("branch_by_rank"))
    assert view._run.disabled and "choose a prediction first" in view._why_not.value
    view._prediction.value = "fails"
    assert not view._run.disabled and "<span></span>" in view._why_not.value.replace(' class="bench-muted"', "")
    view._chosen["same_branch"].value = view._chosen["by_data"].value = True
    view._prediction.value = "fails"
    assert view._run.disabled and "edit the same lines" in view._why_not.value


def test_what_is_chosen_is_a_patch_for_git_apply(home: Path, tmp_path: Path) -> None:
    bench = ddpkit.FixBench(NAME)
    with pytest.raises(LaunchError, match="no remedy is chosen, so there is nothing to patch"):
        bench.patch()
    bench._view = BenchView(bench)
    bench._view._chosen["freeze"].value = True
    assert bench.patch() == bench.patch("freeze")
    debug = next(r for r in bench.remedies if r.env and not r.edits)
    assert bench.patch(debug.name).startswith(f"Set {next(iter(debug.env))}=")
    for ending in ("", "\n"):
        bench.script = PROGRAM.rstrip() + ending
        program = tmp_path / f"{NAME}.py"
        program.write_text(bench.script)
        text = bench.patch("freeze", debug.name)
        subprocess.run(["git", "apply", "-"], input=text, text=True, cwd=tmp_path, check=True)
        assert program.read_text() == bench.script_with("freeze") != bench.script


@pytest.mark.job
def test_a_prediction_is_responded_to_and_a_row_is_shown_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    bench = ddpkit.FixBench(NAME)
    wrong = bench.run("catch", predict="cures")
    assert wrong.response.startswith(
        "You said it cures; it passes but is wrong: exit codes 0 0, and the replicas are 0."
    )
    assert repr(bench) == f"Fix bench: {NAME} · 17 remedies" and wrong.run.name == "unused_parameters_catch"
    assert "<b>Fix bench: unused_parameters · 17 remedies</b><table>" in bench._repr_mimebundle_()["text/html"]
    right = bench.run("freeze", predict="cures")
    told = "As you said, it cures: exit codes 0 0, and the replicas are equal to each other and to one process."
    assert right.response == told and repr(right).endswith(f"→ cures\n{told}")
    assert bench.title.endswith(" · A layer takes no part in the loss, on every rank")
    for _ in range(2):
        InteractiveShell.instance().display_formatter.format(bench.results)
    assert "Freeze" in shown[0]["text/plain"] and not any("Catch" in text for text in shown[0].values())
    assert "Catch" in shown[1]["text/plain"] and "Catch" in shown[1]["text/html"], "where nothing is new, all is shown"


def test_a_hung_run_says_what_each_rank_did(home: Path) -> None:
    bench = ddpkit.FixBench("branch_by_rank", backend="gloo", nproc=4)
    result = bench.run("barrier", predict="fails")
    waits = "rank 1, 2, 3: waits in barrier #4, line 34: torch.distributed.barrier()"
    assert result.cells[-1] == f"rank 0 waits in all_reduce #4, line 32: loss.backward(); {waits}"
    assert result.response == f"You said it fails; it hangs: {result.cells[-1]}."


@pytest.mark.job
def test_a_run_on_the_bench_can_be_stopped_and_no_second_one_starts(home: Path) -> None:
    bench = ddpkit.FixBench(NAME, timeout=120, stall=100)
    endless = "import time\nprint('here', flush=True)\ntime.sleep(1000)\n"
    thread = threading.Thread(target=bench.run, kwargs={"edit": endless})
    thread.start()
    wait_for(lambda: bench._live is not None and len(bench._live.ranks) == 2, 60)
    with pytest.raises(LaunchError, match="a run goes on; wait for it, or stop it"):
        bench.run()
    bench.stop()
    thread.join(60)
    assert not thread.is_alive() and bench.results[0].outcome.ends == "stopped"


@pytest.mark.job
def test_a_run_of_the_readers_own_keeps_what_it_was_launched_with(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its argument this program passes: then the bench would tell of another job."""
    folder = home / "project"
    folder.mkdir()
    (folder / "beside.py").write_text("WIDTH = 4\n")
    (folder / "train.py").write_text(OWN)
    given = {"nproc": 3, "env": {"MY": "1"}, "stall": 20, "max_restarts": 1}
    run = ddpkit.launch(folder / "train.py", args=["--no-aux"], show=False, timeout=120, **given)
    elsewhere = home / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    bench = ddpkit.FixBench(run)
    for warm in (True, False):
        trial = ddpkit.FixBench(run, warm=warm).run(edit="import os\nprint(os.getcwd())").run
        assert trial.ranks[1].stdout == f"{home}\n" and trial.warm is warm and f"cd {home} " in trial.command
    as_it_is = bench.run()
    assert bench.title == "Fix bench: train · MY=1 --no-aux"
    said = "3 ranks · timeout 120.0 · args --no-aux · MY=1 · max_restarts 1 · stall 20.0 · in "
    assert sorted(bench.given.split(" · ")) == sorted(f"{said}{home}".split(" · "))
    assert "warm False" in ddpkit.FixBench(run, warm=False).given
    assert bench.given in BenchView(bench)._head.value and "--max-restarts 1" in as_it_is.run.command
    assert as_it_is.run.nproc == 3 and as_it_is.outcome.ends == "fails"
    assert as_it_is.run.diagnosis and run.diagnosis and as_it_is.run.diagnosis.name == run.diagnosis.name
    assert as_it_is.run.ranks[2].stdout == run.ranks[2].stdout == "3 ranks, MY=1, ['--no-aux']\n"


@pytest.mark.job
def test_a_failure_without_remedies_still_has_a_bench(home: Path) -> None:
    (home / "train.py").write_text("import sys\n\nvalues = {}\nprint(values['loss'])\n")
    run = ddpkit.launch(home / "train.py", show=False, timeout=60)
    bench = ddpkit.FixBench(run)
    assert repr(bench) == (
        "Fix bench: train · the catalog has no remedies for it: ddpkit.explain('own_exception') has its page, and "
        "your own edit can be tried"
    )
    assert bench.run(edit=bench.script.replace("{}", "{'loss': 1}")).run.ok
    assert "has its page" in BenchView(bench).box.children[1].children[1].children[0].value


@pytest.mark.job
@pytest.mark.parametrize(
    ("program", "broken_by", "at", "left_out"),
    [
        (
            "hydra_like",
            {"args": ["model.spare=true"]},
            "loss = nn.functional.mse_loss(self.model(x), y)",
            "ddp = DDP(Net()",
        ),
        (
            "accelerate_like",
            {"env": {"AUXILIARY": "main"}},
            "loss = model(torch.randn(8, 8), auxiliary)",
            "use_extra=here.rank",
        ),
    ],
)
def test_a_remedy_about_a_call_finds_it_in_a_program_that_no_lab_knows(
    home: Path, program: str, broken_by: dict[str, Any], at: str, left_out: str
) -> None:
    path = Path(__file__).parent / "programs" / f"{program}.py"
    assert ddpkit.launch(path, show=False, timeout=120).ok, "it is broken without its switch as well"
    bench = ddpkit.FixBench(ddpkit.launch(path, show=False, timeout=120, **broken_by))
    assert bench.fault is not None and bench.script.splitlines()[bench.fault[0] - 1].strip() == at
    code = BenchView(bench)._diff.value
    assert f"<summary>{bench.fault[0] - 7} lines</summary>" in code and "raised RuntimeError</td>" in code
    assert bench.run("find_unused", predict="cures").response.startswith("As you said, it cures: exit codes 0 0")
    assert bench.title.endswith(" · Parameters took no part in the loss, and DDP waits for their gradients"), (
        "not what the lab's program does"
    )
    assert bench.run("barrier").outcome.ends in ("fails", "hangs")
    others = BenchView(bench)._others().value
    assert f"<code>in the lab, {left_out}" in others and "find_unused" not in others
    added = [line for line in bench.patch("find_unused").splitlines() if line.startswith("+ ")]
    assert len(added) == 1 and added[0].count("find_unused_parameters=True") == 1


@pytest.mark.job
def test_a_model_called_past_ddp_is_found_in_a_readers_program(script: Callable[..., str]) -> None:
    own = (Path(__file__).parent / "programs" / "hydra_like.py").read_text()
    run = ddpkit.launch(script(own.replace("self.model(x)", "self.model.module(x)")), show=False, timeout=120)
    bench = ddpkit.FixBench(run)
    assert run.ok and bench.run("barrier").outcome.ends == "wrong"
    assert bench.run("call_ddp").cures and bench.script_with("call_ddp") == own
