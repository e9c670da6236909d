"""Small programs that fail for real: which rank is named, which page is given, and the words of the sentence."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import RECORDS

import ddpkit

pytestmark = [pytest.mark.job, pytest.mark.usefixtures("warm_process")]
MEETS = """
import os, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
"""
DATA_UTILS = """
import torch, torch.distributed as dist

def checked(rank):
    if rank == 1:
        raise ValueError("bad shard")

def summed(rank):
    for i in range(3):
        if rank == 1 and i == 1:
            dist.all_reduce(
                torch.tensor(1.0),
                op=dist.ReduceOp.MAX,  # of all
            )
        dist.all_reduce(torch.ones(4))
"""


@dataclass(frozen=True)
class Case:
    """A program after `MEETS`, and what is said of it: the culprit, the page, words in the sentence, and words that are not."""

    name: str
    program: str
    culprit: Any
    page: str
    said: tuple[str, ...]
    unsaid: tuple[str, ...] = ()
    nproc: int = 2
    options: dict[str, Any] = field(default_factory=dict)


HANGS = {"stall": 2, "stop_on_stall": True}
CASES = [
    Case(
        "a chain of exceptions",
        """
        def step(i):
            try:
                if rank == 1 and i == 3:
                    raise ValueError("label 7 is out of range")
                dist.all_reduce(torch.ones(4))
            except Exception as e:
                raise RuntimeError("training step failed") from e
        for i in range(6):
            step(i)
        """,
        1,
        "own_exception",
        ("it began with ValueError: label 7 is out of range (line 11: raise ValueError(",),
    ),
    Case(
        "an exception in another file",
        "import data_utils\ndata_utils.checked(rank)\ndist.barrier()",
        1,
        "own_exception",
        ('(line 5 of data_utils.py: raise ValueError("bad shard"))',),
    ),
    Case(
        "a scalar, and a call over several lines of another file",
        "import data_utils\ndata_utils.summed(rank)",
        None,
        "collective_mismatch",
        (
            "all_reduce of [4] Float (line 14 of data_utils.py: dist.all_reduce(torch.ones(4)))",
            "all_reduce of scalar Float (line 10 of data_utils.py: dist.all_reduce(torch.tensor(1.0), op=dist.ReduceOp.MAX))",
        ),
        ("[] Float",),
        options=HANGS,
    ),
    Case(
        "a frame of an installed package",
        """
        import typer
        app = typer.Typer()
        @app.command()
        def main(width: int = 3):
            if rank == 1:
                nn.Linear(4, 2)(torch.ones(2, width))
            dist.barrier()
        app()
        """,
        1,
        "own_exception",
        ("(line 13: nn.Linear(4, 2)(torch.ones(2, width)))",),
    ),
    Case(
        "a mismatch that ends in an absurd allocation",
        """
        x = torch.arange(2.0) + 10 * rank
        if rank == 0:
            dist.all_gather([torch.zeros(2) for _ in range(2)], x)
        names = [None, None]
        dist.all_gather_object(names, {"rank": rank, "name": "x" * 50})
        """,
        0,
        "collective_mismatch",
        ("rank 0 joined all_gather of [2] Float", "rank 1 joined all_gather of [1] Long"),
        ("memory",),
    ),
    Case(
        "a mismatch that ends in an absurd allocation, and nothing tells which rank is wrong",
        """
        x = torch.arange(2.0) + 10 * rank
        for _ in {0: [1.0], 1: []}[rank]:
            dist.all_gather([torch.zeros(2) for _ in range(2)], x)
        names = [None, None]
        dist.all_gather_object(names, {"rank": rank, "name": "x" * 50})
        """,
        None,
        "collective_mismatch",
        ("rank 0 joined all_gather of [2] Float", "cannot be told"),
        ("memory",),
    ),
    Case(
        "an error swallowed on one rank, and then the same exception on all",
        """
        stats = {}
        for step in range(6):
            try:
                if rank == 1 and step == 3:
                    raise OSError("cannot read shard 3")
                dist.all_reduce(torch.ones(1))
                stats["sum"] = step
            except Exception:
                stats.pop("sum", None)
            print(stats["sum"])
        """,
        1,
        "own_exception",
        ("Rank 1 raised KeyError: 'sum'",),
        ("very rank",),
        nproc=3,
    ),
    Case(
        "each rank makes only the process group that it is in",
        """
        group = dist.new_group(sorted([rank, (rank + 1) % 4]))
        dist.all_reduce(torch.ones(2), group=group)
        dist.barrier()
        """,
        None,
        "collective_mismatch",
        ("rank 0 named [0, 1]; rank 1 named [1, 2]", "Every rank must make all groups"),
        ("left early",),
        nproc=4,
        options=HANGS,
    ),
    Case(
        "a step without its backward",
        """
        model = DDP(nn.Linear(4, 1))
        for step in range(8):
            loss = model(torch.randn(8, 4)).mean()
            if rank == 1 and step == 5:
                continue
            loss.backward()
        dist.barrier()
        """,
        1,
        "collective_mismatch",
        (
            "Rank 1 has left the loop in line 9; rank 0 called all_reduce there 8 times, rank 1 7 times: "
            "line 12 (continue) may skip it, in which turn is not recorded.",
        ),
        options=HANGS,
    ),
    Case(
        "unused parameters",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.aux = nn.Linear(4, 4), nn.Linear(4, 1)
            def forward(self, x):
                return self.body(x)
        net = DDP(Net())
        for step in range(3):
            net(torch.ones(2, 4)).sum().backward()
        """,
        "every rank",
        "unused_parameters",
        ("no gradient came for aux.weight, aux.bias.",),
    ),
    Case(
        "keys of a checkpoint that do not fit",
        """
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        if rank == 1:
            net.load_state_dict({f"module.{name}": value for name, value in net.state_dict().items()})
        dist.barrier()
        """,
        1,
        "checkpoint_keys",
        ('Missing key(s) in state_dict: "0.weight"', 'Unexpected key(s) in state_dict: "module.0.weight"'),
    ),
    Case(
        "a load before the file is written",
        """
        if rank == 0:
            dist.recv(torch.zeros(1), src=1)  # rank 1 is about to load
            time.sleep(0.5)
            torch.save({}, "best.pt")
        else:
            dist.send(torch.zeros(1), dst=0)
        torch.load("best.pt")
        dist.barrier()
        """,
        1,
        "half_written_checkpoint",
        ("a barrier is missing before the load",),
    ),
]
SPAWNS = """
import os
import torch.distributed as dist
import torch.multiprocessing as mp

def worker(rank, world_size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    dist.init_process_group(
        "gloo", rank=rank, world_size=world_size
    )

if __name__ == "__main__":
    mp.spawn(worker, args=(2,), nprocs=2)
"""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_failure_is_told_in_the_programs_own_terms(case: Case, home: Path, script: Callable[..., str]) -> None:
    if case.options and not RECORDS:
        pytest.skip("this torch records no collectives of gloo")
    script(DATA_UTILS, "data_utils.py")
    path = script(MEETS + textwrap.dedent(case.program))
    run = ddpkit.launch(path, nproc=case.nproc, show=False, **{"timeout": 60, **case.options})
    assert (run.culprit, run.diagnosis and run.diagnosis.name) == (case.culprit, case.page), str(run)
    for words in case.said:
        assert words in run.verdict.sentence, run.verdict.sentence
    for words in case.unsaid:
        assert words not in run.verdict.sentence, run.verdict.sentence


def test_processes_that_the_ranks_spawn_are_looked_at(home: Path, script: Callable[..., str]) -> None:
    run = ddpkit.launch(script(SPAWNS), nproc=2, show=False, stall=3, stop_on_stall=True, timeout=120)
    assert (run.culprit, run.diagnosis and run.diagnosis.name) == ("every rank", "spawn_under_torchrun"), str(run)
    said = 'A process that it started is in worker, line 7: dist.init_process_group("gloo", rank=rank, world_size='
    assert said in run.verdict.sentence, run.verdict.sentence


def test_the_lines_of_a_function_of_a_module_are_those_of_the_launched_file(
    home: Path, script: Callable[..., str]
) -> None:
    script(DATA_UTILS, "data_utils.py")
    path = home / "mine.py"
    path.write_text("import data_utils\ndef train(rank):\n    data_utils.checked(rank)\n    raise OSError('mine')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(home))
        import mine  # type: ignore[import-not-found]
    own, other = (ddpkit.launch(mine.train, args=(rank,), nproc=1, show=False, timeout=60) for rank in (0, 1))
    assert "(line 4: raise OSError('mine'))" in own.verdict.sentence
    assert "(line 5 of data_utils.py: " in other.verdict.sentence


def test_files_that_pip_installs_into_a_folder_of_its_own_are_not_the_readers(tmp_path: Path) -> None:
    from ddpkit.runfolder.frames import is_own

    (tmp_path / "hydra-1.3.dist-info").mkdir()
    (tmp_path / "hydra-1.3.dist-info" / "RECORD").write_text("hydra/main.py,sha256=x,12\nhydra/utils.py,,\n")
    assert not is_own(str(tmp_path / "hydra" / "main.py"))
    assert is_own(str(tmp_path / "train.py"))
    assert not is_own("<eval_with_key>.3") and not is_own("/tmp/torchinductor_me/ab/cab.py")
