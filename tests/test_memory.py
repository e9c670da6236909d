"""The memory budget of a rank: a true limit, the same warm and cold; what it counts, whom it spares, and the figure of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import has_fully_shard
from test_records import write_rank, write_run

import ddpkit
from ddpkit import Run
from ddpkit.display import memory_plot
from ddpkit.display.memory_plot import RankMemory, memory
from ddpkit.runfolder import wire

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="on the CPU a budget needs Linux")
Script = Callable[..., str]

# Tensors of so many MiB.
MIB = "lambda mib: torch.ones(int(mib * 2**18))"


def launch(path: str, **options: Any) -> Run:
    return ddpkit.launch(path, show=False, **{"timeout": 120, "backend": "gloo", **options})


def reported(run: Run) -> dict[str, Any]:
    assert run.ok, f"{run}\n{[r.stderr[-2000:] for r in run.ranks]}"
    return run.reported[0]


def record(folder: Path, rank: int, *lines: dict[str, Any], torn: str = "") -> None:
    """What a rank writes down of its memory."""
    text = "".join(json.dumps({"at_ns": 1, **line}) + "\n" for line in lines)
    (wire.rank_folder(folder, 0, rank) / wire.MEMORY).write_text(text + torn)


def line(what: str, budget: float | None, used: float, peak: float, step: int = 0, **parts: float) -> dict[str, Any]:
    known = dict.fromkeys(wire.MEMORY_PARTS, 0.0) | {name.replace("_", " "): size for name, size in parts.items()}
    return {"what": what, "step": step, "budget_mib": budget, "used_mib": used, "peak_mib": peak, "parts_mib": known}


# A true limit.


@pytest.mark.job
@on_linux
def test_what_does_not_fit_fails_on_every_rank_and_what_fits_passes(script: Script, way: str) -> None:
    """The budget is a number of MiB of tensors, whatever Python, torch and the imports of DDP take, warm or cold."""
    path = script(
        f"""
        import sys, torch
        from torch.nn.parallel import DistributedDataParallel as DDP
        from ddpkit.rank import memory_budget, report, setup

        tensor = {MIB}
        with setup() as here:
            budget = memory_budget(64)
            DDP(torch.nn.Linear(8, 8))(torch.ones(8, 8)).sum().backward()
            held = tensor(float(sys.argv[1]))
            report(used=budget.used_mib(), peak=budget.peak_mib())
        """
    )
    fits = launch(path, args=["54"])
    assert fits.ok, str(fits)
    for rank in (0, 1):
        assert 54 < fits.reported[rank]["used"] < 62 and 54 < fits.reported[rank]["peak"] < 62
    over = launch(path, args=["66"])
    assert over.state == "failed" and over.culprit == "every rank", str(over)
    assert over.diagnosis is not None and over.diagnosis.name == "out_of_memory_cpu"
    assert all("DefaultCPUAllocator: can't allocate memory" in r.failure.message for r in over.ranks if r.failure)


@pytest.mark.job
@on_linux
def test_freed_tensors_come_back_and_the_peak_stays(script: Script) -> None:
    path = script(
        f"""
        import torch
        from ddpkit.rank import memory_budget, report, setup

        tensor = {MIB}
        with setup():
            budget = memory_budget(64)
            for size in (40, 1, 50, 0.2, 30):
                kept = None
                kept = [tensor(0.2) for _ in range(20)] + [tensor(size)]
            del kept
            report(used=budget.used_mib(), peak=budget.peak_mib())
        """
    )
    found = reported(launch(path, nproc=1))
    assert found["used"] < 4 and 50 < found["peak"] < 60


@pytest.mark.job
@on_linux
def test_tensors_that_exist_already_count(script: Script) -> None:
    path = script(
        f"""
        import torch
        from ddpkit.rank import is_out_of_memory, memory_budget, report, setup

        tensor = {MIB}
        with setup():
            first = tensor(40)
            try:
                memory_budget(30)
            except ValueError as error:
                report(refused=str(error))
            memory_budget(60)
            second = tensor(15)
            try:
                third = tensor(10)
            except RuntimeError as error:
                report(caught=is_out_of_memory(error), said="out of memory" in str(error))
            memory_budget(80)
            third = tensor(10)
            report(other=is_out_of_memory(ValueError("out of memory")))
        """
    )
    found = reported(launch(path, nproc=1))
    assert found["refused"] == (
        "memory_budget: 30 MiB asked for, but this rank's tensors hold 40 MiB already; "
        "ask for more, or call it before the model is built."
    )
    assert found["caught"] is True and found["said"] is False and found["other"] is False


@pytest.mark.job
@on_linux
def test_other_processes_are_not_limited_and_the_limit_can_be_lifted(script: Script) -> None:
    """Those forked and those spawned by multiprocessing, as DataLoader workers are; the hard limit is left as it was."""
    path = script(
        f"""
        import multiprocessing, resource, torch
        from torch.utils.data import DataLoader, Dataset
        from ddpkit.rank import memory_budget, report, setup

        tensor = {MIB}

        class Large(Dataset):
            def __len__(self):
                return 2
            def __getitem__(self, i):
                return float(tensor(200)[0])

        def child(found):
            found.put((len(tensor(200)), resource.getrlimit(resource.RLIMIT_DATA)))

        if __name__ == "__main__":
            with setup():
                before = resource.getrlimit(resource.RLIMIT_DATA)
                budget = memory_budget(100)
                limited = resource.getrlimit(resource.RLIMIT_DATA)
                seen = {{}}
                for way in ("fork", "spawn"):
                    context = multiprocessing.get_context(way)
                    found = context.SimpleQueue()
                    process = context.Process(target=child, args=(found,))
                    process.start()
                    seen[way] = found.get()[1]
                    process.join()
                batches = [b.sum().item() for b in DataLoader(Large(), num_workers=1)]
                still = resource.getrlimit(resource.RLIMIT_DATA)
                budget.lift()
                lifted = resource.getrlimit(resource.RLIMIT_DATA)
                large = tensor(200)
                report(before=before, limited=limited, still=still, lifted=lifted, batches=batches, **seen)
        """
    )
    # A process that is forked beside threads of OpenMP would wait for them.
    found = reported(launch(path, nproc=1, env={"OMP_NUM_THREADS": "1"}))
    assert found["fork"] == found["spawn"] == found["lifted"] == found["before"]
    assert found["limited"] == found["still"] and found["limited"][1] == found["before"][1]
    assert found["limited"][0] != found["before"][0] and found["batches"] == [1.0, 1.0]


@pytest.mark.job
@on_linux
def test_where_there_can_be_no_budget_one_sentence_says_so(script: Script) -> None:
    path = script(
        """
        import resource, sys
        from ddpkit.rank import memory_budget, report, setup

        def said(mib=10):
            try:
                memory_budget(mib)
            except RuntimeError as error:
                return str(error)

        with setup():
            sys.platform, real = "darwin", sys.platform
            elsewhere = said()
            sys.platform = real
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(resource.RLIMIT_DATA, (2**32, 2**32))
            too_much = said(5000)
            limit, resource.setrlimit = resource.setrlimit, lambda *_: None
            unheld = said()
            report(elsewhere=elsewhere, too_much=too_much, unheld=unheld)
        """
    )
    found = reported(launch(path, nproc=1))
    assert found["elsewhere"] == "memory_budget: on the CPU this needs Linux, and this is darwin."
    assert found["too_much"] == "memory_budget: 5000 MiB are more than `ulimit -Hd` leaves this process."
    assert "this system does not hold a process to RLIMIT_DATA" in found["unheld"]


# What fills it.

TRAINING = """
import sys, torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from ddpkit.rank import memory_budget, report, setup

way = sys.argv[1]
with setup() as here:
    budget = memory_budget(None)
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    if way == "fsdp":
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (here.world_size,))
        for layer in net:
            fully_shard(layer, mesh=mesh)
        net = fully_shard(net, mesh=mesh)
    else:
        net = DDP(net, gradient_as_bucket_view=way == "view")
    if way == "zero":
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=1e-3)
    else:
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(4):
        net(torch.ones(4, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    report(parts=budget.parts_mib())
"""


@pytest.mark.job
@on_linux
@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("plain", [8, 8, 16, 8]),
        ("view", [8, 8, 16, 0]),
        ("zero", [8, 8, 8, 8]),
        pytest.param("fsdp", [4, 4, 8, 0], marks=has_fully_shard),
    ],
)
def test_the_parts_of_the_peak_are_told_from_each_other(script: Script, way: str, expected: list[int]) -> None:
    run = launch(script(TRAINING), args=[way])
    assert run.ok, str(run)
    for rank in memory(run):
        assert [round(size) for size in rank.parts_mib.values()] == expected
        assert list(rank.parts_mib) == list(wire.MEMORY_PARTS)
        assert sum(expected) < rank.peak_mib < sum(expected) + 12 and rank.rest_mib < 12
        assert len(rank.used_mib) == 4 and rank.budget_mib is None and not rank.ran_out
    assert run.reported[0]["parts"]["gradients"] == 0.0


@pytest.mark.job
@on_linux
def test_a_rank_that_ran_out_is_drawn_with_its_budget(script: Script) -> None:
    path = script(
        f"""
        import torch
        from ddpkit.rank import memory_budget, setup

        tensor = {MIB}
        with setup() as here:
            memory_budget(40)
            kept = [tensor(8) for _ in range(9 if here.rank == 1 else 1)]
        """
    )
    run = launch(path)
    assert run.culprit == 1, str(run)
    zero, one = memory(run)
    assert one.ran_out and not zero.ran_out
    assert 30 < one.peak_mib < 42 and one.rest_mib > 30
    figure = memory_plot.draw(Run.from_folder(run.folder))
    assert figure.alt == (
        "The memory of train. rank 0 stayed within its budget of 40 MiB, filled mostly by activations and the rest; "
        "rank 1 ran out of its budget of 40 MiB and was refused 8 MiB more, filled mostly by activations and the rest."
    )
    assert figure.png(50).startswith(b"\x89PNG")


@pytest.mark.job
def test_on_a_gpu_the_budget_is_the_allocators(script: Script) -> None:
    path = script(
        """
        import torch
        from ddpkit.rank import is_out_of_memory, memory_budget, report, setup

        with setup() as here:
            budget = memory_budget(256)
            tensor = lambda mib: torch.ones(int(mib * 2**18), device=here.device)
            try:
                large = tensor(300)
            except torch.OutOfMemoryError as error:
                report(said=str(error), told=is_out_of_memory(error))
            held = tensor(200)
            report(peak=budget.peak_mib())
            budget.lift()
            large = tensor(300)
        """
    )
    if "0 GPUs" in _gpus():
        pytest.skip("there is no GPU here")
    found = reported(launch(path, nproc=1, backend="nccl"))
    assert "CUDA out of memory" in found["said"] and found["told"] and 200 <= found["peak"] <= 256


def _gpus() -> str:
    code = "import torch; print(torch.cuda.device_count(), 'GPUs')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout


# The record and its figure.


def test_the_last_budget_counts_and_a_torn_line_does_not(tmp_path: Path) -> None:
    write_run(tmp_path, nproc=3)
    for rank in range(3):
        write_rank(tmp_path, rank, exitcode=0)
    record(tmp_path, 0, line("budget", 10, 0, 0), line("step", 10, 5, 9), line("budget", 64, 5, 5), torn='{"what": "st')
    steps = [line("step", 64, 10 * step, 50, step, parameters=8, optimizer_state=30) for step in (2, 3, 4)]
    record(tmp_path, 1, line("budget", 64, 0, 0), *steps, line("end", 64, 41, 60, parameters=8, optimizer_state=30))
    first, second = memory(Run.from_folder(tmp_path))
    assert (first.budget_mib, first.peak_mib, first.used_mib) == (64, 5, ())
    assert second.steps == (2, 3, 4) and second.used_mib == (20, 30, 40)
    assert second.rest_mib == 22 and second.filled_by == "optimizer state"
    figure = memory_plot.draw(Run.from_folder(tmp_path))
    assert len(figure.figure.axes) == 2
    assert [label.get_text() for label in figure.figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1"]
    assert figure.png(50).startswith(b"\x89PNG")


def test_more_parts_than_peak_leave_no_rest() -> None:
    found = RankMemory(0, None, 10.0, {"parameters": 8.0, "gradients": 8.0}, (), (), False)
    assert found.rest_mib == 0.0 and found.filled_by == "parameters"


def test_without_a_record_it_is_said_how_to_make_one(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_rank(tmp_path, 0, exitcode=0)
    with pytest.raises(LookupError, match=r"no rank wrote down its memory; call ddpkit.rank.memory_budget\(None\)"):
        memory_plot.draw(Run.from_folder(tmp_path))


@on_linux
@pytest.mark.parametrize("by_the_kernel", [True, False])
def test_beyond_the_memory_of_the_host_the_worker_is_killed_and_not_the_rank(by_the_kernel: bool) -> None:
    """Where no cgroup may be made, the first of these is the second."""
    program = f"""
import os
from ddpkit.rank.memory import smaller_host
if not {by_the_kernel}:
    smaller_host._enter_cgroup = lambda mib: False
smaller_host.host_memory(64)
for mib in (32, 192):
    worker = os.fork()
    if worker == 0:
        held = [b"x" * (1 << 20) + bytes([i]) for i in range(mib)]
        import time
        time.sleep(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0", "-9"], done.stderr
