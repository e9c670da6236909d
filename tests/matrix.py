"""Distinct failures as real jobs, each with what is true of it: how the job ends, who is at fault, what it is called."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import pytest

import ddpkit

PREAMBLE = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
rank = int(os.environ["RANK"])
"""
INIT = """
dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(4))
"""
IMPATIENT = """
dist.init_process_group("gloo", timeout=timedelta(seconds=2))
for _ in range(3):
    dist.all_reduce(torch.ones(4))
"""
# An older torch records no collectives of gloo: then stacks alone tell, without numbers.
RECORDS = tuple(map(int, metadata.version("torch").split(".")[:2])) >= (2, 13)
needs_record = pytest.mark.skipif(not RECORDS, reason="this torch records no collectives of gloo")
HANGS: dict[str, Any] = {"stall": 2, "stop_on_stall": True}


@dataclass(frozen=True)
class Case:
    """A script, how it is launched, and the truth: `culprit` as `run.culprit` gives it, `diagnosis` a page of the catalog,
    `says` words that the verdict's sentence must hold, `needs_record` whether only collectives can tell."""

    name: str
    script: str
    culprit: object
    diagnosis: str
    state: str = "failed"
    nproc: int = 2
    says: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    needs_record: bool = False

    @property
    def text(self) -> str:
        """The whole script."""
        return textwrap.dedent(self.script).lstrip("\n")


def untrue(case: Case, path: str) -> str:
    """Launch the case from the script at `path`; what is said of it that is not true, or ""."""
    run = ddpkit.launch(path, nproc=case.nproc, show=False, **{"timeout": 120, **case.options})
    again = ddpkit.Run.from_folder(run.folder)
    said = (run.state, run.culprit, run.diagnosis and run.diagnosis.name)
    words = case.says if RECORDS else ()
    if said != (case.state, case.culprit, case.diagnosis) or not all(w in run.verdict.sentence for w in words):
        return f"{said} instead of {(case.state, case.culprit, case.diagnosis)}, with {case.says}: {run}"
    if (str(again), str(again.diagnosis)) != (str(run), str(run.diagnosis)):
        return f"read again it says {again}"
    return ""


def case(name: str, body: str, culprit: object, diagnosis: str, init: str = INIT, **rest: Any) -> Case:
    return Case(name, PREAMBLE + init + textwrap.dedent(body), culprit, diagnosis, **rest)


def hang(name: str, body: str, culprit: object, diagnosis: str, init: str = INIT, **rest: Any) -> Case:
    options = {**HANGS, **rest.pop("options", {})}
    return case(name, body, culprit, diagnosis, init, state="hung", options=options, **rest)


CASES = [
    # Hangs, ended at the stall.
    hang(
        "a rank sleeps instead of joining",
        """
        def evaluate():
            dist.all_reduce(torch.ones(1))
        if rank == 1:
            time.sleep(1000)
        evaluate()
        """,
        1,
        "skipped_collective",
        says=("Rank 1 never joined all_reduce #4", "time.sleep(1000)", "Rank 0 waits there"),
    ),
    hang(
        "one of four computes without end",
        """
        if rank == 2:
            while True:
                pass
        dist.all_reduce(torch.ones(1))
        """,
        2,
        "skipped_collective",
        nproc=4,
        says=("Rank 2 never joined all_reduce #4", "computes at", "Ranks 0, 1 and 3 wait there"),
    ),
    hang(
        "a barrier only some reach",
        """
        if rank != 2:
            dist.barrier()
        else:
            time.sleep(1000)
        """,
        2,
        "skipped_collective",
        nproc=3,
        says=("Rank 2 never joined barrier #4",),
    ),
    hang(
        "different collectives, two ranks",
        """
        if rank == 0:
            dist.all_reduce(torch.ones(4))
        else:
            dist.broadcast(torch.ones(4), 0)
        dist.barrier()
        """,
        None,
        "collective_mismatch",
        needs_record=True,
        says=("collective #4", "rank 0 joined all_reduce", "rank 1 joined broadcast"),
    ),
    hang(
        "different collectives, one against two",
        """
        if rank == 1:
            dist.barrier()
        else:
            dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4))
        """,
        1,
        "collective_mismatch",
        nproc=3,
        needs_record=True,
        says=("Rank 1 left the common way", "the other ranks agree"),
    ),
    hang(
        "a rank skips one of two collectives of a step",
        """
        for step in range(6):
            if not (rank == 1 and step == 4):
                dist.all_reduce(torch.ones(4))
            dist.broadcast(torch.ones(4), 0)
        """,
        1,
        "collective_mismatch",
        needs_record=True,
        says=("Rank 1 left the common way",),
    ),
    hang(
        "a rank leaves with exit code 0 before init_process_group",
        """
        if rank == 1:
            sys.exit(0)
        dist.init_process_group("gloo")
        """,
        1,
        "missing_rank_at_init",
        init="",
        says=("Rank 1 never came to init_process_group", "it left early with exit code 0"),
    ),
    hang(
        "a stopped rank",
        """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))
        """,
        1,
        "stopped_process",
        says=("Rank 1 is stopped (SIGSTOP)",),
    ),
    hang(
        "a loader's worker is stuck",
        """
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, i):
                if rank == 1 and i == 5:
                    time.sleep(1000)
                return torch.ones(2)
        for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1):
            dist.all_reduce(batch)
        """,
        1,
        "loader_worker_stuck",
        says=("Rank 1", "DataLoader worker", "The worker is in", "__getitem__", "time.sleep(1000)"),
    ),
    hang(
        "a rank never comes to init_process_group",
        """
        if rank == 1:
            time.sleep(1000)
        dist.init_process_group("gloo")
        """,
        1,
        "missing_rank_at_init",
        init="",
        says=("Rank 1 never came to init_process_group", "Rank 0 waits there"),
    ),
    hang(
        "a world size that is too large",
        """
        dist.init_process_group("gloo", rank=rank, world_size=3)
        """,
        "every rank",
        "missing_rank_at_init",
        init="",
        says=("world size of 3", "torchrun started 2"),
    ),
    hang(
        "a rank asks for the store at a wrong port",
        """
        if rank == 1:
            os.environ["MASTER_PORT"] = "1"
        dist.init_process_group("gloo")
        """,
        1,
        "wrong_address",
        init="",
        options={"stall": 3},
    ),
    hang(
        "every rank sleeps",
        """
        time.sleep(1000)
        """,
        "every rank",
        "silent_wait",
        says=("Every rank sits at", "time.sleep(1000)"),
    ),
    hang(
        "DDP waits in backward for a rank that loads data",
        """
        net = DDP(torch.nn.Linear(4, 1))
        def load_batch(step):
            if rank == 1 and step == 2:
                time.sleep(1000)
            return torch.ones(2, 4)
        for step in range(5):
            net(load_batch(step)).sum().backward()
        """,
        1,
        "skipped_collective",
        # DDP's constructor imports for a second, for seconds on a busy machine.
        options={"stall": 6},
        says=("Rank 1 never joined all_reduce", "load_batch", "Rank 0 waits there"),
    ),
    hang(
        "two groups joined in another order",
        """
        a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
        for group in ((a, b) if rank == 0 else (b, a)):
            dist.all_reduce(torch.ones(1), group=group)
        """,
        None,
        "everyone_waits",
        says=("wait for each other",),
    ),
    # Failures that end by themselves.
    case(
        "a timeout of gloo while a peer sleeps",
        """
        if rank == 1:
            time.sleep(1000)
        dist.all_reduce(torch.ones(1))
        """,
        1,
        "skipped_collective",
        init=IMPATIENT,
        says=("Rank 1 never joined all_reduce #4", "Rank 0 waited there in vain"),
    ),
    case(
        "a straggler that comes after the timeout",
        """
        if rank == 1:
            time.sleep(3)
        dist.all_reduce(torch.ones(1))
        """,
        1,
        "straggler",
        init=IMPATIENT,
        needs_record=True,
        says=("Rank 1 came too late to all_reduce #4",),
    ),
    case(
        "sizes differ, gloo aborts",
        """
        dist.all_reduce(torch.ones(1000 if rank == 0 else 4))
        dist.barrier()
        """,
        None,
        "collective_mismatch",
    ),
    case(
        "a rank's exception, met by others as a closed connection",
        """
        if rank == 1:
            raise ValueError("boom")
        dist.all_reduce(torch.ones(1))
        """,
        1,
        "own_exception",
        nproc=3,
        says=("Rank 1 raised ValueError: boom",),
    ),
    case(
        "an early exit met by others as a closed connection",
        """
        if rank == 1:
            sys.exit(0)
        dist.all_reduce(torch.ones(1))
        """,
        1,
        "early_exit",
    ),
    case(
        "killed by SIGKILL",
        """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
        """,
        1,
        "killed",
    ),
    case(
        "a segmentation fault",
        """
        if rank == 1:
            import ctypes; ctypes.string_at(0)
        dist.all_reduce(torch.ones(1))
        """,
        1,
        "segmentation_fault",
    ),
    case(
        "sys.exit with a text",
        """
        if rank == 1:
            sys.exit("no data found")
        dist.all_reduce(torch.ones(1))
        """,
        1,
        "exit_code",
    ),
    case(
        "parameters unused on every rank",
        """
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
            def forward(self, x):
                return self.used(x)
        net = DDP(Net())
        for step in range(3):
            net(torch.ones(2, 4)).sum().backward()
        """,
        "every rank",
        "unused_parameters",
    ),
    case(
        "parameters unused on one rank",
        """
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
            def forward(self, x):
                return self.a(x) + (self.b(x) if rank == 0 else 0)
        net = DDP(Net())
        for step in range(3):
            net(torch.ones(2, 4)).sum().backward()
        """,
        1,
        "unused_parameters",
    ),
    case(
        "marked ready twice",
        """
        from torch.utils.checkpoint import checkpoint
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            def forward(self, x):
                x = checkpoint(self.b, self.a(x), use_reentrant=True)
                return checkpoint(self.b, x, use_reentrant=True)
        net = DDP(Net())
        net(torch.ones(2, 4)).sum().backward()
        """,
        "every rank",
        "marked_ready_twice",
    ),
    case(
        "a loader's worker is killed",
        """
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, i):
                if rank == 1 and i == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                return torch.ones(2)
        for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1):
            dist.all_reduce(batch)
        """,
        1,
        "loader_worker_killed",
    ),
    case(
        "a loader's worker raises",
        """
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, i):
                if rank == 1 and i == 5:
                    raise ValueError("bad record 5")
                return torch.ones(2)
        for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1):
            dist.all_reduce(batch)
        """,
        1,
        "loader_worker_exception",
    ),
    case(
        "out of memory on the CPU",
        """
        if rank == 1:
            torch.empty(1 << 50)
        dist.all_reduce(torch.ones(1))
        """,
        1,
        "out_of_memory_cpu",
    ),
    case(
        "NCCL without NCCL",
        """
        dist.init_process_group("nccl")
        """,
        "every rank",
        "backend_not_built_in",
        init="",
    ),
    case(
        "no such network interface",
        """
        dist.init_process_group("gloo")
        """,
        "every rank",
        "network_interface",
        init="",
        options={"env": {"GLOO_SOCKET_IFNAME": "eth77"}},
    ),
    case(
        "parameter shapes differ between ranks",
        """
        DDP(torch.nn.Linear(4, 1 + rank))
        dist.barrier()
        """,
        None,
        "shapes_differ_between_ranks",
    ),
    case(
        "parameter shapes of rank 0 differ from all others'",
        """
        DDP(torch.nn.Linear(4, 2 if rank == 0 else 1))
        dist.barrier()
        """,
        0,
        "shapes_differ_between_ranks",
        nproc=3,
    ),
    case(
        "no process group",
        """
        dist.all_reduce(torch.ones(1))
        """,
        "every rank",
        "process_group_missing",
        init="",
    ),
    case(
        "an import that is missing",
        """
        import no_such_module
        """,
        "every rank",
        "import_error",
    ),
    case("a syntax error", "def broken(:\n", "every rank", "syntax_error", init=""),
]
