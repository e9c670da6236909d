"""Distinct failures as real jobs, each with what is true of it: how the job ends, who is at fault, what it is called."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any

from conftest import HAS_NCCL, RECORDS

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
HANGS: dict[str, Any] = {"stall": 2, "stop_on_stall": True}


@dataclass(frozen=True)
class Case:
    """A script, how it is launched, and the truth: `culprit` as `run.culprit` gives it, `diagnosis` a page of the catalog,
    `says` words that the verdict's sentence must hold, `since_2_13` whether an older torch, which
    records no collectives of gloo, tells less or does otherwise."""

    name: str
    script: str
    culprit: object
    diagnosis: str
    state: str = "failed"
    nproc: int = 2
    says: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    since_2_13: bool = False

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
        since_2_13=True,
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
        since_2_13=True,
        says=("Rank 1 left the common way", "the other ranks agree"),
    ),
    hang(
        "a rank skips one collective of its row in a mesh of two by two",
        """
        rows, columns = ([dist.new_group(g) for g in groups] for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
        for step in range(6):
            if not (rank == 3 and step == 3):
                dist.all_reduce(torch.ones(4), group=rows[rank // 2])
            dist.all_reduce(torch.ones(4), group=columns[rank % 2])
        dist.barrier()
        """,
        3,
        "skipped_collective",
        nproc=4,
        since_2_13=True,
        says=("Rank 3 left the common way", "as nobody else ever did"),
    ),
    hang(
        "a rank skips a collective of its pair, and its partner gives that up, logs it and waits in the last barrier",
        """
        from datetime import timedelta
        pairs = [dist.new_group(g, timeout=timedelta(seconds=2)) for g in ([0, 1], [2, 3])]
        try:
            for step in range(6):
                if not (rank == 2 and step == 3):
                    dist.all_reduce(torch.ones(4), group=pairs[rank // 2])
                dist.all_reduce(torch.ones(8))
        except RuntimeError as error:
            print(f"rank {rank} failed: {error}", flush=True)
        finally:
            dist.barrier()
        """,
        2,
        "skipped_collective",
        nproc=4,
        options={"stall": 4.0},
        since_2_13=True,
        says=("Rank 2 never joined all_reduce #4 of group 2", "Rank 3 gave it up after"),
    ),
    hang(
        "a rank keeps the lock on a file for which the others wait",
        """
        import fcntl, tempfile
        journal = open(os.path.join(tempfile.gettempdir(), f"journal-{os.getppid()}"), "a")
        for step in range(5):
            fcntl.flock(journal, fcntl.LOCK_EX)
            if not (rank == 2 and step > 1):
                fcntl.flock(journal, fcntl.LOCK_UN)
            dist.all_reduce(torch.ones(4))
        """,
        2,
        "skipped_collective",
        nproc=3,
        since_2_13=True,
        says=(
            "for the lock on a file at line 14: fcntl.flock(journal, fcntl.LOCK_EX), which rank 2 holds; it waits in",
        ),
    ),
    hang(
        "a rank sleeps with a lock of filelock's for which the others ask again and again",
        """
        import tempfile
        from filelock import FileLock
        time.sleep(0.3 * rank)
        with FileLock(os.path.join(tempfile.gettempdir(), f"download-{os.getppid()}")):
            while rank == 0:
                time.sleep(1)
        dist.barrier()
        """,
        0,
        "silent_wait",
        nproc=3,
        says=("Ranks 1 and 2 wait for the lock on a file", "which rank 0 holds; it sits at line 16: time.sleep(1)"),
    ),
    hang(
        "a rank without a shard goes on without the marks of files for which the others look",
        """
        import tempfile
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        def marked_by_all(step):
            open(f"{folder[0]}/{step}-{rank}", "w").close()
            while True:
                if len([name for name in os.listdir(folder[0]) if name.startswith(f"{step}-")]) == 4:
                    return
                time.sleep(0.05)
        for step in range(3):
            if step * 4 + rank < 11:
                marked_by_all(step)
            dist.all_reduce(torch.ones(1))
        """,
        3,
        "skipped_collective",
        nproc=4,
        says=("Ranks 0, 1 and 2 wait at line 19: time.sleep(0.05), for", "rank 3 alone went on without it"),
    ),
    hang(
        "a thread that sets a key of the store fails on one rank",
        """
        import threading
        store = dist.distributed_c10d._get_default_store()
        def tell(turn):
            if rank == 2 and turn == 2:
                raise ValueError("nothing to tell")
            store.set(f"pace/{turn}/{rank}", "1")
        for turn in range(4):
            threading.Thread(target=tell, args=(turn,)).start()
            dist.all_reduce(torch.ones(4))
            store.wait([f"pace/{turn}/{each}" for each in range(4)], timedelta(seconds=60))
        """,
        2,
        "store_key_never_set",
        nproc=4,
        says=('for the key "pace/2/2" of the store', 'rank 2, who set "pace/1/2" (line 16'),
    ),
    hang(
        "the thread that sends fails on one rank, and both ranks wait",
        """
        import threading
        def give():
            for row in range(5):
                if rank == 1 and row == 3:
                    raise ValueError("row 3 is torn")
                dist.send(torch.ones(4), 1 - rank)
        threading.Thread(target=give).start()
        for row in range(5):
            dist.recv(torch.ones(4), 1 - rank)
        dist.barrier()
        """,
        1,
        "unmatched_send_recv",
    ),
    case(
        "a rank skips a collective of its pair, and every rank catches what it meets then, and leaves with a code",
        """
        import sys
        from datetime import timedelta
        pairs = [dist.new_group(g, timeout=timedelta(seconds=2)) for g in ([0, 1], [2, 3])]
        try:
            for step in range(6):
                if not (rank == 2 and step == 3):
                    dist.all_reduce(torch.ones(4), group=pairs[rank // 2])
                dist.all_reduce(torch.ones(8))
        except RuntimeError as error:
            print(f"rank {rank} failed: {error}", flush=True)
            sys.exit(7)
        """,
        2,
        "skipped_collective",
        nproc=4,
        since_2_13=True,
        says=("Rank 2 never joined all_reduce #4 of group 2", "Rank 3 waited there in vain"),
    ),
    hang(
        "in the first step on a mesh a rank skips a sum of its row, and comes through that of its column",
        """
        rows, columns = ([dist.new_group(g) for g in groups] for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
        row, column = rows[rank // 2], columns[rank % 2]
        dist.all_reduce(torch.ones(4), group=row)
        if rank != 2:
            dist.all_reduce(torch.ones(1), group=row)
        dist.all_reduce(torch.ones(4), group=column)
        dist.all_reduce(torch.ones(1))
        """,
        2,
        "skipped_collective",
        nproc=4,
        since_2_13=True,
        says=("Rank 2 left the common way",),
    ),
    hang(
        "of two pairs of ranks, one rank of the second never joins its pair",
        """
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        for step in range(3):
            dist.all_reduce(torch.ones(4), group=pairs[rank // 2])
        if rank == 3:
            time.sleep(3600)
        dist.all_reduce(torch.ones(4), group=pairs[rank // 2])
        dist.barrier()
        """,
        3,
        "skipped_collective",
        nproc=4,
        since_2_13=True,
        says=("Rank 3 never joined all_reduce #4 of group", "rank 2 waits in all_reduce #4"),
    ),
    hang(
        "a rank broadcasts from another rank than the others do",
        """
        dist.broadcast_object_list([rank], src=1 if rank == 2 else 0)
        dist.barrier()
        """,
        2,
        "collective_mismatch",
        nproc=4,
        says=("Rank 2", "rank 1"),
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
        since_2_13=True,
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
        "every rank asks for the store at the port of a tutorial",
        """
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="12355")
        dist.init_process_group("gloo", rank=rank, world_size=2)
        """,
        "every rank",
        "wrong_address",
        init="",
        says=("Every rank asked for the store at localhost:12355",),
        since_2_13=True,
    ),
    hang(
        "a rank does not come to a new process group",
        """
        if rank != 2:
            dist.new_group()
        dist.barrier()
        """,
        2,
        "skipped_collective",
        nproc=4,
        since_2_13=True,
        says=(
            "A new process group takes every rank, and rank 2 waits in barrier #4",
            "2 by rank 1, 1 by rank 2, 2 by rank 3. Rank 2 differs",
        ),
    ),
    case(
        "two of three come to a monitored barrier, the third is in its next step",
        """
        for step in range(4):
            dist.all_reduce(torch.ones(4))
            if not (rank == 2 and step == 2):
                dist.monitored_barrier(timeout=timedelta(seconds=2))
        """,
        2,
        "skipped_collective",
        nproc=3,
        since_2_13=True,
        says=("Rank 2 never came to the monitored barrier", "it waits in all_reduce #"),
    ),
    case(
        "a monitored barrier of a subgroup counts its own ranks",
        """
        group = dist.new_group([1, 2, 3])
        if rank == 2:
            time.sleep(3600)
        if rank:
            dist.monitored_barrier(group=group, timeout=timedelta(seconds=2))
        """,
        2,
        "skipped_collective",
        nproc=4,
        since_2_13=True,
        says=("Rank 2 never came to the monitored barrier", "time.sleep(3600)"),
    ),
    hang(
        "a rank has another world size in its environment",
        """
        if rank == 1:
            os.environ["WORLD_SIZE"] = "2"
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(4))
        """,
        1,
        "missing_rank_at_init",
        nproc=3,
        init="",
        since_2_13=True,
    ),
    hang(
        "a rank makes a process group of fewer ranks than the others make it of",
        """
        evaluators = [0, 1] if rank == 2 else [0, 1, 2]
        group = dist.new_group(evaluators)
        if rank in evaluators:
            dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()
        """,
        2,
        "collective_mismatch",
        nproc=4,
        says=("must be of the same ranks for all: rank 0 names [0, 1, 2]", "rank 2 names [0, 1]; rank 3"),
        since_2_13=True,
    ),
    hang(
        "a rank looks for the others in another file",
        """
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"meet_{rank == 2}")
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)
        """,
        2,
        "wrong_address",
        init="",
        nproc=3,
        says=("The ranks ask for different stores at line", "Rank 2 differs"),
    ),
    hang(
        "a rank goes on to its second process group, and the others are still in the first",
        """
        for trial in range(2):
            for step in range(3 if rank == 1 and trial == 0 else 4):
                dist.all_reduce(torch.ones(4))
            # The others must not notice: the connections stay open.
            kept = dist.group.WORLD._get_backend(torch.device("cpu"))
            dist.destroy_process_group()
            dist.init_process_group("gloo", f"file://{os.getcwd()}/trial_{trial}", rank=rank, world_size=3)
        """,
        1,
        "skipped_collective",
        nproc=3,
        since_2_13=True,
        says=("Rank 1 never joined all_reduce #7", "it waits for the others to join at line"),
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
        "straggler",
        init=IMPATIENT,
        since_2_13=True,
        says=("Rank 1 had not come to all_reduce #4", "Rank 0 waited there in vain"),
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
        since_2_13=True,
        says=("Rank 1 came too late to all_reduce #4",),
    ),
    case(
        "ranks that wait for one who polls are ended by a guard of their own",
        """
        import threading
        if rank == 1:
            while not os.path.exists("/nowhere/next_epoch"):
                time.sleep(0.05)
        guard = threading.Timer(4, os._exit, [17])
        guard.start()
        dist.all_reduce(torch.ones(1))
        """,
        1,
        "skipped_collective",
        nproc=3,
        since_2_13=True,
        says=("Rank 1 never joined all_reduce #4", "time.sleep(0.05)"),
    ),
    case(
        "a rank comes to a sum that the others have given up, and they try again",
        """
        group = dist.new_group(timeout=timedelta(seconds=2))
        if rank == 0:
            time.sleep(4.5)
        for attempt in range(2):
            try:
                dist.all_reduce(torch.ones(1), group=group)
            except RuntimeError:
                if attempt:
                    raise
                time.sleep(5)
        """,
        0,
        "straggler",
        nproc=3,
        since_2_13=True,
        says=("Rank 0 came to all_reduce #1 of group 1", "had given up waiting by then"),
    ),
    case(
        "in a ring whose blocks were of one length, one rank's is shorter, and so is the room that it has",
        """
        for step in range(4):
            block = torch.zeros(14 if (rank, step) == (2, 2) else 16, 4)
            came = torch.empty_like(block)
            both = [dist.P2POp(dist.isend, block, (rank + 1) % 4), dist.P2POp(dist.irecv, came, (rank - 1) % 4)]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            dist.barrier()
        """,
        2,
        "collective_mismatch",
        nproc=4,
        says=("rank 2 had room for 224 bytes", "Rank 2 differs from the others."),
        since_2_13=True,
    ),
    case(
        "in a ring whose blocks are of another length each time, one rank's is longer than the others'",
        """
        for step, rows in enumerate((4, 6, 8)):
            block = torch.zeros(rows + (2 if (rank, step) == (0, 2) else 0), 4)
            came = torch.empty_like(block)
            both = [dist.P2POp(dist.isend, block, (rank + 1) % 3), dist.P2POp(dist.irecv, came, (rank - 1) % 3)]
            for work in dist.batch_isend_irecv(both):
                work.wait()
        """,
        0,
        "collective_mismatch",
        nproc=3,
        says=("rank 0 sent 160, rank 2 sent 128 from that line. Rank 0 differs",),
        since_2_13=True,
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
        "one rank sends less than the others, gloo aborts it",
        """
        dist.all_reduce(torch.ones(100, dtype=torch.half if rank == 1 else torch.float))
        dist.barrier()
        """,
        1,
        "collective_mismatch",
        nproc=3,
        since_2_13=True,
        says=("Rank 1 left the common way at collective #4", "the other ranks agree"),
    ),
    case(
        "one rank sends more than the others, gloo aborts a neighbour",
        """
        dist.all_reduce(torch.ones(120 if rank == 0 else 80))
        dist.barrier()
        """,
        0,
        "collective_mismatch",
        nproc=5,
        since_2_13=True,
        says=("Rank 0 left the common way at collective #4", "rank 4 joined all_reduce of [80] Float"),
        options=HANGS,
    ),
    case(
        "a rank skips a collective and meets the others in its next one, smaller",
        """
        for step in range(4):
            if not (rank == 1 and step == 2):
                dist.all_reduce(torch.ones(32))
            dist.all_reduce(torch.ones(1))
        """,
        1,
        "collective_mismatch",
        since_2_13=True,
        says=("Rank 1 left the common way at collective #8", "in earlier steps every rank did otherwise"),
    ),
    case(
        "Work.wait(timeout) gives up",
        """
        if rank == 1:
            time.sleep(100)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        work.wait(timedelta(seconds=2))
        """,
        1,
        "straggler",
        nproc=3,
        since_2_13=True,
        says=("Rank 1 had not come to all_reduce #4", "time.sleep(100)"),
    ),
    case(
        "a loader's timeout, whose rank is long in leaving",
        """
        from torch.utils.data import DataLoader
        class Slow(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, i):
                time.sleep(60 if rank == 1 else 0)
                return torch.zeros(1)
        for x in DataLoader(Slow(), num_workers=1, timeout=1, multiprocessing_context="fork"):
            dist.all_reduce(x)
        """,
        1,
        "loader_timeout",
        options=HANGS,
        says=("Rank 1 raised RuntimeError: DataLoader timed out",),
    ),
    case(
        "all but one rank leave by sys.exit(0) before a collective",
        """
        if rank != 0:
            sys.exit(0)
        dist.all_reduce(torch.ones(1))
        """,
        (1, 2),
        "early_exit",
        nproc=3,
        says=("left early with exit code 0 at line", "sys.exit(0)"),
    ),
    case(
        "a rank joins the collective of another group, with other sizes",
        """
        rows, columns = ([dist.new_group(g) for g in groups] for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
        row, column = rows[rank // 2], columns[rank % 2]
        for step in range(4):
            dist.all_reduce(torch.ones(16), group=row)
            dist.all_reduce(torch.ones(64), group=row if rank == 3 and step == 2 else column)
        """,
        3,
        "collective_mismatch",
        nproc=4,
        since_2_13=True,
        says=("Rank 3 left the common way", "in earlier steps every rank did otherwise"),
    ),
    case(
        "every rank builds a model of its own width",
        """
        DDP(torch.nn.Linear(8, 16 * (rank + 1)))
        """,
        "every rank",
        "shapes_differ_between_ranks",
        nproc=3,
        says=("params[0] has [32, 8] on rank 1", "No two of the ranks agree."),
    ),
    case(
        "rank 0 builds a wider model than the others",
        """
        DDP(torch.nn.Linear(8, 32 if rank == 0 else 16))
        """,
        0,
        "shapes_differ_between_ranks",
        nproc=3,
        says=("Rank 0 differs from most",),
    ),
    case(
        "a rank has no file left to open, not even for its record",
        """
        kept = []
        while rank == 1:
            kept.append(open(os.devnull))
        dist.barrier()
        """,
        1,
        "too_many_open_files",
        says=("Rank 1 raised OSError: [Errno 24]", "kept.append(open(os.devnull))"),
    ),
    case(
        "a rank catches its error and leaves by sys.exit",
        """
        try:
            {}["lr"] if rank == 1 else None
        except KeyError:
            sys.exit(3)
        dist.barrier()
        """,
        1,
        "exit_code",
        says=("Rank 1 left by sys.exit, exit code 3", "while it handled KeyError: 'lr'"),
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
        "NCCL where there is none",
        """
        dist.init_process_group("nccl")
        """,
        "every rank",
        "invalid_device" if HAS_NCCL else "backend_not_built_in",
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
    hang(
        "a request is waited for, and its sender sleeps",
        """
        if rank == 0:
            request = dist.irecv(torch.zeros(2), src=1)
            request.wait()
        if rank == 1:
            time.sleep(1000)
        dist.barrier()
        """,
        1,
        "unmatched_send_recv",
        nproc=3,
        says=("Rank 1 never joined what rank 0 waits for", "it sits at"),
        since_2_13=True,
    ),
    hang(
        "the middle stage of a pipeline of isend and irecv sleeps",
        """
        x = torch.zeros(4)
        for step in range(4):
            if rank == 1 and step == 2:
                time.sleep(3600)
            if rank > 0:
                dist.irecv(x, rank - 1).wait()
            if rank < 3:
                dist.isend(x, rank + 1).wait()
        """,
        1,
        "unmatched_send_recv",
        nproc=4,
        since_2_13=True,
        says=("Rank 1 never joined what rank 0 waits for", "time.sleep(3600)"),
    ),
    hang(
        "a ring of exchanges, and one rank sleeps",
        """
        for step in range(4):
            if rank == 2 and step == 2:
                time.sleep(3600)
            there, back = (rank + 1) % 4, (rank - 1) % 4
            ops = [dist.P2POp(dist.isend, torch.ones(4), there), dist.P2POp(dist.irecv, torch.zeros(4), back)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        """,
        2,
        "unmatched_send_recv",
        nproc=4,
        since_2_13=True,
        says=("Rank 2 never joined what rank", "time.sleep(3600)"),
    ),
    hang(
        "a callback waits for what only the one who waits for it does",
        """
        import threading
        seen = threading.Event()
        def then(future):
            if rank == 1:
                seen.wait()
            return future.value()
        if rank == 0:
            time.sleep(1)  # else the others' work may be over before its callback is given, which then runs in their own line
        work = dist.all_reduce(torch.ones(4), async_op=True)
        future = work.get_future().then(then)
        future.wait()
        seen.set()
        dist.barrier()
        """,
        1,
        "skipped_collective",
        nproc=3,
        says=("Rank 1 never joined barrier #5", "it waits in all_reduce #4, which is over for the others"),
        since_2_13=True,
    ),
    hang(
        "a rank has nothing to send and goes on",
        """
        if rank == 0:
            for source in range(1, 4):
                dist.recv(torch.zeros(4), source)
        elif rank != 2:
            dist.send(torch.ones(4), 0)
        dist.barrier()
        """,
        2,
        "unmatched_send_recv",
        nproc=4,
        says=("rank 0 waits for rank 2 at", "Rank 2 left the common way", "most ranks came to another one"),
        since_2_13=True,
    ),
    hang(
        "a stage hands one batch less on",
        """
        for step in range(6):
            x = torch.ones(4)
            if rank == 1:
                dist.recv(x, 0)
                if step < 5:
                    dist.send(x, 2)
            elif rank == 0:
                dist.send(x, 1)
            else:
                dist.recv(x, 1)
            dist.barrier()
        """,
        1,
        "unmatched_send_recv",
        nproc=3,
        says=("Rank 1 left the common way", "has passed on 0 of 1 messages that came to it from rank 0"),
        since_2_13=True,
    ),
    hang(
        "the last stage of a pipeline takes one micro-batch less than the others",
        """
        x = torch.ones(4)
        for batch in range(3):
            micro_batches = 2 if (rank, batch) == (2, 2) else 3
            for _ in range(micro_batches):
                if rank:
                    dist.recv(x, rank - 1)
                if rank < 2:
                    dist.send(x, rank + 1)
            for _ in range(micro_batches):
                if rank < 2:
                    dist.recv(x, rank + 1)
                if rank:
                    dist.send(x, rank - 1)
        """,
        2,
        "unmatched_send_recv",
        nproc=3,
        says=("Rank 2 left the common way: rank 1 waits for exchange 3 of 3 in a row with it",),
        since_2_13=True,
    ),
    hang(
        "a rank leaves out the broadcasts before the function that all have trained by is called once more",
        """
        model = DDP(torch.nn.Linear(4, 1))
        def train(batches):
            for batch in batches:
                model(batch).sum().backward()
        train([torch.ones(2, 4)] * 3)
        if rank:
            for parameter in model.module.parameters():
                dist.broadcast(parameter.data, 1)
        for epoch in range(2):
            train([torch.ones(2, 4)] * 3)
        """,
        0,
        "collective_mismatch",
        nproc=3,
        says=("Rank 0 left the common way at collective #",),
        options={"stall": 6},
        since_2_13=True,
    ),
    hang(
        "the first stage of a pipeline cuts its last batch into a part less, and says of each part how long it is",
        """
        x = torch.ones(4)
        for batch in range(3):
            for _ in range(2 if (rank, batch) == (0, 2) else 3):
                if rank:
                    dist.recv(torch.zeros(1), rank - 1)
                    dist.recv(x, rank - 1)
                if rank < 2:
                    dist.send(torch.ones(1), rank + 1)
                    dist.send(x, rank + 1)
            if rank < 2:
                dist.recv(x, rank + 1)
            if rank:
                dist.send(x, rank - 1)
        """,
        0,
        "unmatched_send_recv",
        nproc=3,
        says=("Rank 0 left the common way: rank 1 waits for exchange 5 of 6 in a row with it",),
        since_2_13=True,
    ),
    hang(
        "a worker swallows a task, and the master waits for an answer of whichever comes first",
        """
        for turn in range(4):
            if rank == 0:
                for worker in (1, 2):
                    dist.send(torch.ones(2), worker)
                for _ in range(2):
                    dist.recv(torch.zeros(2))
            else:
                dist.recv(torch.zeros(2), 0)
                if (rank, turn) != (1, 2):
                    dist.send(torch.ones(2), 0)
        """,
        1,
        "unmatched_send_recv",
        nproc=3,
        says=("Rank 1 left the common way: from recv with rank 0", "as nobody else ever did"),
        since_2_13=True,
    ),
    hang(
        "in a sum over a tree a rank without a partner does not go up",
        """
        x, distance = torch.ones(2), 1
        while distance < 3:
            if rank % (2 * distance):
                dist.send(x, rank - distance)
                break
            if rank + distance < 3:
                dist.recv(x, rank + distance)
            elif rank:
                break
            distance *= 2
        if rank:
            dist.recv(x, 0)
        """,
        2,
        "unmatched_send_recv",
        nproc=3,
        says=("Rank 2 left the common way: rank 0 waits for a message of it such as rank 1 sent",),
        since_2_13=True,
    ),
    hang(
        "the last rank of a ring of stages hands nothing on to the first",
        """
        x = torch.ones(2)
        for chunk in range(2):
            if rank or chunk:
                dist.recv(x, (rank - 1) % 4)
            if rank < 3:
                dist.send(x, rank + 1)
        """,
        3,
        "unmatched_send_recv",
        nproc=4,
        says=("Rank 3 left the common way: it has sent 0 messages on, and each of the others 1",),
        since_2_13=True,
    ),
    hang(
        "the master tells all workers but the last that the work is done",
        """
        x = torch.ones(2)
        if rank == 0:
            for worker in (1, 2, 3):
                dist.send(x, worker)
            for worker in (1, 2, 3):
                dist.recv(x, worker)
            for worker in (1, 2):
                dist.send(torch.zeros(2), worker)
        else:
            dist.recv(x, 0)
            while x.any():
                dist.send(x, 0)
                dist.recv(x, 0)
        dist.barrier()
        """,
        0,
        "unmatched_send_recv",
        nproc=4,
        says=("Rank 0 left the common way: rank 3 waits for one more of it",),
        since_2_13=True,
    ),
    hang(
        "one receive too many",
        """
        for step in range(3):
            if rank == 0:
                for source in (1, 2):
                    dist.recv(torch.zeros(4), source)
                if step == 2:
                    dist.recv(torch.zeros(4), 1)
            else:
                dist.send(torch.ones(4), 0)
            dist.barrier()
        """,
        0,
        "unmatched_send_recv",
        nproc=3,
        says=("Rank 0 left the common way: from recv with rank 2", "it came to recv with rank 1"),
        since_2_13=True,
    ),
    hang(
        "two receive from each other, a third stands by",
        """
        if rank == 1:
            time.sleep(1000)
        dist.recv(torch.zeros(2), src=2 - rank)
        """,
        None,
        "everyone_waits",
        nproc=3,
        says=("Ranks 0 and 2 wait for each other",),
    ),
    hang(
        "the training runs in a thread",
        """
        import threading
        def train():
            for step in range(5):
                if rank == 1 and step == 3:
                    time.sleep(1000)
                dist.all_reduce(torch.ones(4))
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        """,
        1,
        "skipped_collective",
        says=("Rank 1 never joined all_reduce #7", "time.sleep(1000)"),
    ),
    hang(
        "a rank waits for a queue, beside a thread that only beats",
        """
        import queue, threading
        def beat():
            while True:
                time.sleep(0.1)
        threading.Thread(target=beat, daemon=True).start()
        if rank == 1:
            queue.Queue().get()
        dist.barrier()
        """,
        1,
        "skipped_collective",
        says=("Rank 1 never joined barrier", "queue.Queue().get()"),
    ),
    hang(
        "a rank computes without end in one call that holds the GIL",
        """
        if rank == 1:
            sum(range(10**14))
        dist.barrier()
        """,
        1,
        "skipped_collective",
        nproc=3,
        says=("Rank 1 never joined barrier", "it computes at line", "sum(range(10**14))"),
    ),
    hang(
        "a rank goes round and round over a loader that has no batch",
        """
        from torch.utils.data import DataLoader
        loader = DataLoader(range(6 if rank == 1 else 40), batch_size=8, drop_last=True)
        def batches():
            while True:
                for batch in loader:
                    yield batch
        for _, batch in zip(range(3), batches()):
            dist.all_reduce(batch)
        """,
        1,
        "skipped_collective",
        says=("Rank 1 never joined all_reduce #4", "it computes at line"),
    ),
    hang(
        "a collective is asked for its end, again and again",
        """
        if rank == 1:
            time.sleep(1000)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        while not work.is_completed():
            time.sleep(0.05)
        """,
        1,
        "skipped_collective",
        says=("Rank 1 never joined all_reduce #4",),
        since_2_13=True,
    ),
    hang(
        "a first evaluation that one rank does not come to",
        """
        net = DDP(torch.nn.Linear(4, 1))
        bad_step = 4 * rank
        for step in range(8):
            if step and step == bad_step:
                continue
            net(torch.ones(2, 4)).sum().backward()
            if step == 4:
                dist.reduce(torch.ones(2), 0)
        """,
        None,
        "collective_mismatch",
        says=("Which of them is wrong cannot be told",),
        since_2_13=True,
    ),
    hang(
        "an error that was dealt with stands on stderr",
        """
        print("[Errno 98] Address already in use: port 6006, trying 6007", file=sys.stderr)
        if rank == 1:
            time.sleep(1000)
        dist.all_reduce(torch.ones(1))
        """,
        1,
        "skipped_collective",
    ),
    case(
        "a thread prints while nothing moves",
        """
        import threading
        def alive():
            while True:
                print("alive", flush=True)
                time.sleep(0.5)
        threading.Thread(target=alive, daemon=True).start()
        if rank == 1:
            time.sleep(1000)
        dist.all_reduce(torch.ones(1))
        """,
        1,
        "skipped_collective",
        state="timed_out",
        options={"timeout": 10},
        since_2_13=True,
    ),
    case(
        "slow steps, and the limit is reached",
        """
        while True:
            if rank == 1:
                time.sleep(2.5)
            dist.all_reduce(torch.ones(4))
        """,
        None,
        "time_limit",
        state="timed_out",
        options={"timeout": 10, "stall": 20},
        since_2_13=True,
    ),
    case(
        "an exception, and then a barrier in finally",
        """
        try:
            if rank == 1:
                raise ValueError("bad sample 17")
            dist.all_reduce(torch.ones(4))
        finally:
            dist.barrier()
        """,
        1,
        "own_exception",
        init=IMPATIENT,
        says=("Rank 1 raised ValueError: bad sample 17",),
    ),
    case(
        "one rank builds a deeper model",
        """
        DDP(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2 + (rank == 2)))))
        """,
        2,
        "shapes_differ_between_ranks",
        nproc=3,
        says=("rank 2 has 6 parameters", "Rank 2 differs from the others"),
    ),
    hang(
        "a child process outlives the script",
        """
        import multiprocessing
        dist.barrier()
        if rank == 0:
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,)).start()
        """,
        0,
        "silent_wait",
        says=("Rank 0 has come to the end of its script, and Python waits for a child process",),
    ),
    case(
        "one of three skips a collective, and gloo aborts another",
        """
        net = DDP(torch.nn.Linear(64, 64))
        for step in range(8):
            net(torch.ones(2, 64)).sum().backward()
            if (rank, step) != (2, 5):
                dist.all_reduce(torch.ones(1))
        """,
        2,
        "collective_mismatch",
        nproc=3,
        says=("Rank 2 left the common way", "the other ranks agree"),
        since_2_13=True,
    ),
    case(
        "two of four leave the loop early",
        """
        net = DDP(torch.nn.Linear(64, 64))
        for step in range(6 if rank < 2 else 4):
            net(torch.ones(2, 64)).sum().backward()
        dist.all_reduce(torch.ones(2))
        """,
        (2, 3),
        "collective_mismatch",
        nproc=4,
        says=("Ranks 2 and 3 have fewer turns of the loop in line 12 than the others: ",),
        since_2_13=True,
    ),
    hang(
        "a rank gives another's number",
        """
        os.environ["RANK"] = "0"
        dist.init_process_group("gloo")
        """,
        1,
        "missing_rank_at_init",
        init="",
        says=("Rank 1 asked to join as rank 0",),
        since_2_13=True,
    ),
    case(
        "two of four agree on something, and two may be an epoch ahead",
        """
        net = DDP(torch.nn.Linear(64, 64))
        losses = [0.9, 0.2 if rank < 2 else 0.5, 0.1]
        for epoch in range(3):
            for step in range(2):
                net(torch.ones(2, 64)).sum().backward()
            if losses[epoch] < 0.3:
                dist.all_reduce(torch.ones(1))
        """,
        None,
        "collective_mismatch",
        nproc=4,
        says=("The ranks part at", "Which of them is wrong cannot be told"),
        since_2_13=True,
    ),
    case(
        "one rank of a mesh has a collective too many, which the other column tells",
        """
        columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        column = columns[rank % 2]
        net, shown = DDP(torch.nn.Linear(64, 64), process_group=column), rank == 0
        for step in range(6):
            net(torch.ones(2, 64)).sum().backward()
            if shown and step == 2:
                dist.all_reduce(torch.ones(1), group=column)
        """,
        0,
        "collective_mismatch",
        nproc=4,
        says=("Rank 0 left the common way", "most ranks of the job did as rank 2"),
        since_2_13=True,
    ),
    hang(
        "one rank of a mesh sums over its row before the world",
        """
        rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        for group in (rows[rank // 2], None) if rank == 1 else (None, rows[rank // 2]):
            if group:
                dist.all_reduce(torch.ones(1), group=group)
            else:
                dist.all_reduce(torch.ones(1))
        """,
        1,
        "skipped_collective",
        nproc=4,
        says=(
            "Rank 1 never joined all_reduce #4",
            "it waits in all_reduce #1 of group 1",
            "Rank 1 left the common way",
        ),
        since_2_13=True,
    ),
    hang(
        "each rank has a port of its own for the store",
        """
        port = 20000 + (os.getpid() * 2 + rank) % 10000
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        """,
        None,
        "missing_rank_at_init",
        init="",
        says=("Every rank waits for the others at line", "dist.TCPStore"),
    ),
    hang(
        "one rank does not come to the store that another has opened",
        """
        port = int(os.environ["MASTER_PORT"]) % 10000 + 20000
        if rank == 1:
            time.sleep(1000)
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        """,
        1,
        "missing_rank_at_init",
        init="",
        says=("Rank 1 never came to the store; it sits at line 9: time.sleep(1000)", "Rank 0 waits there at line 10"),
    ),
    hang(
        "one rank goes to the store by a tunnel that is not open",
        """
        where = "127.0.0.1:7022" if rank == 2 else f"localhost:{os.environ['MASTER_PORT']}"
        dist.init_process_group("gloo", init_method=f"tcp://{where}", rank=rank, world_size=3)
        """,
        2,
        "wrong_address",
        nproc=3,
        init="",
        says=("Rank 2 asked for the store at 127.0.0.1:7022", "the others wait in vain"),
    ),
    hang(
        "a rank does not come to the address that the others have agreed on",
        """
        if rank == 2:
            time.sleep(1000)
        port = int(os.environ["MASTER_PORT"]) % 10000 + 20000
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
        """,
        2,
        "missing_rank_at_init",
        nproc=3,
        init="",
        says=("Rank 2 never came to init_process_group; it sits at line 8: time.sleep(1000)",),
    ),
    case(
        "one of three meets over a file",
        """
        import tempfile
        over = f"file://{tempfile.mkdtemp()}/meet" if rank == 1 else "env://"
        count = int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=over, rank=rank, world_size=count, timeout=timedelta(seconds=4))
        """,
        1,
        "wrong_address",
        nproc=3,
        init="",
        says=("Rank 1 asked for the store at file:///tmp/",),
    ),
    case(
        "one of four gathers more than the others",
        """
        mine = torch.ones(20 if rank == 0 else 15)
        dist.all_gather([torch.empty_like(mine) for _ in range(4)], mine)
        dist.barrier()
        """,
        0,
        "collective_mismatch",
        nproc=4,
        says=("Rank 0 left the common way at collective #4", "rank 2 joined all_gather of [15] Float"),
        since_2_13=True,
    ),
    case(
        "one of three makes its buckets smaller",
        """
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(5)), torch.nn.Linear(512, 10))
        net = DDP(net, bucket_cap_mb=1 if rank == 1 else 25, find_unused_parameters=True)
        for _ in range(3):
            net(torch.randn(4, 512)).sum().backward()
        """,
        1,
        "collective_mismatch",
        nproc=3,
        says=("Rank 1 left the common way at collective #",),
        since_2_13=True,
    ),
    case(
        "one of four reduces half as much as the others",
        """
        dist.reduce(torch.ones(40 if rank == 2 else 80), dst=0)
        dist.barrier()
        """,
        2,
        "collective_mismatch",
        nproc=4,
        says=("Rank 2 left the common way at collective #4", "rank 1 joined reduce of [80] Float"),
        since_2_13=True,
    ),
    case(
        "one of three has fewer tensors in a coalesced all-reduce",
        """
        dist.all_reduce_coalesced([torch.ones(n) for n in ((32,) if rank == 1 else (16, 32))])
        """,
        1,
        "collective_mismatch",
        nproc=3,
        says=("Rank 1 left the common way at collective #4",),
        since_2_13=True,
    ),
    case(
        "one of four exchanges twice as much as the others",
        """
        rows = torch.ones(640 if rank == 1 else 320)
        dist.all_to_all_single(torch.empty_like(rows), rows)
        dist.barrier()
        """,
        1,
        "collective_mismatch",
        nproc=4,
        says=("Rank 1 left the common way at collective #4",),
        since_2_13=True,
    ),
    case(
        "one of three has less room for what is scattered",
        """
        parts = [torch.ones(20) for _ in range(3)] if rank == 0 else None
        dist.scatter(torch.empty(16 if rank == 2 else 20), parts, src=0)
        dist.barrier()
        """,
        2,
        "collective_mismatch",
        nproc=3,
        says=("Rank 2 left the common way at collective #4", "rank 2 joined scatter of [16] Float"),
        since_2_13=True,
    ),
    hang(
        "a rank sends its part of a gather to another destination",
        """
        to = 1 if rank == 3 else 0
        dist.gather(torch.ones(4), [torch.empty(4) for _ in range(4)] if rank == to else None, dst=to)
        dist.barrier()
        """,
        3,
        "collective_mismatch",
        nproc=4,
        says=("Rank 3 left the common way at collective #4", "rank 3 joined gather of [4] Float to rank 1"),
        since_2_13=True,
    ),
    case(
        "one of three broadcasts more than the others and has gone on",
        """
        for size in (4, 12, 3, 7) if rank == 2 else (4, 3, 7):
            dist.broadcast(torch.ones(size), src=2)
        dist.barrier()
        """,
        2,
        "collective_mismatch",
        nproc=3,
        says=("Rank 2 left the common way at collective #5", "rank 2 joined broadcast of [12] Float"),
        since_2_13=True,
    ),
    hang(
        "one of three waits for a key that nobody sets",
        """
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            store.set("classes", "10")
        classes = store.get("classes" if rank < 2 else "clases")
        dist.barrier()
        """,
        2,
        "store_key_never_set",
        nproc=3,
        says=(
            "Rank 2 never joined barrier #4",
            'it waits for the key "clases" of the store at line 14: classes = store',
        ),
        since_2_13=True,
    ),
    hang(
        "a client sends two messages where the others send one",
        """
        for _ in range(3):
            dist.broadcast(torch.ones(4), src=0)
            for client in (1, 2, 3) if rank == 0 else ():
                dist.recv(torch.ones(8), src=client)
            for _part in range(2 if rank == 2 else 1) if rank else ():
                dist.send(torch.ones(8), dst=0)
        """,
        2,
        "unmatched_send_recv",
        nproc=4,
        says=("Rank 2 left the common way: after the same calls most ranks came to another one",),
        since_2_13=True,
    ),
    case(
        "the rank that holds a store of its own leaves before the others are done with it",
        """
        port = int(os.environ["MASTER_PORT"]) % 10000 + 20000
        store = dist.TCPStore("127.0.0.1", port, 3, is_master=rank == 0, timeout=timedelta(seconds=20))
        dist.barrier()
        while rank:
            store.add("done", 1)
            time.sleep(0.1)
        """,
        0,
        "early_exit",
        nproc=3,
        says=("Ranks 1 and 2 lost a store at line 15: store.add", "rank 0 had left with exit code 0"),
    ),
    hang(
        "a rank starts itself anew in the middle of the training",
        """
        if rank == 1 and "AGAIN" not in os.environ:
            os.environ["AGAIN"] = "1"
            os.execv(sys.executable, [sys.executable, *sys.argv])
        dist.all_reduce(torch.ones(4))
        """,
        1,
        "skipped_collective",
        nproc=3,
        says=("Rank 1 never joined all_reduce #4",),
        since_2_13=True,
    ),
    case(
        "the alarm of the others ends them while one of three is late",
        """
        if rank == 1:
            time.sleep(100)
        signal.alarm(4)
        dist.all_reduce(torch.ones(4))
        signal.alarm(0)
        """,
        1,
        "skipped_collective",
        nproc=3,
        since_2_13=True,
        says=(
            "Rank 1 never joined what rank 0 waits for at line 14: dist.all_reduce",
            "it sits at line 12: time.sleep(100)",
        ),
    ),
    case(
        "the alarm of the others ends them while one of three gathers what they do not",
        """
        signal.alarm(4)
        if rank == 2:
            signal.alarm(0)
            dist.all_gather_object([None] * 3, "a report")
        dist.all_reduce(torch.ones(4))
        """,
        2,
        "collective_mismatch",
        nproc=3,
        says=("Rank 2 left the common way: each of the others was at line 15: dist.all_reduce",),
        since_2_13=True,
    ),
    case(
        "a timer of faulthandler's ends the others while one of three is late",
        """
        import faulthandler
        if rank == 1:
            time.sleep(100)
        faulthandler.dump_traceback_later(4, exit=True)
        dist.all_reduce(torch.ones(4))
        """,
        1,
        "skipped_collective",
        nproc=3,
        since_2_13=True,
        says=(
            "Rank 1 never joined what rank 0 waits for at line 15: dist.all_reduce",
            "it sits at line 13: time.sleep(100)",
        ),
    ),
    case(
        "a timer of faulthandler's ends a rank that waits for nobody",
        """
        import faulthandler
        if rank == 1:
            faulthandler.dump_traceback_later(1, exit=True)
            time.sleep(100)
        dist.all_reduce(torch.ones(4))
        """,
        1,
        "exit_code",
        says=("Rank 1 left by faulthandler.dump_traceback_later, Timeout (", "(line 14: time.sleep(100))"),
    ),
    case(
        "the others raise that another rank has failed, and who did leaves quietly",
        """
        flag = torch.tensor([int(rank == 2), 1])
        dist.all_reduce(flag)
        if rank != 2 and flag[0]:
            raise RuntimeError("stopping, as another rank failed")
        """,
        2,
        "own_exception",
        nproc=3,
        says=("Ranks 0 and 1 raised RuntimeError: stopping", "rank 2 raised nothing and left with exit code 0"),
    ),
    case(
        "one of four raises that another rank has failed, and two are ended before they say anything",
        """
        flag = torch.tensor([int(rank == 0), 1])
        dist.all_reduce(flag)
        if rank in (0, 1):
            time.sleep(100)
        raise RuntimeError("a rank has failed")
        """,
        None,
        "unknown",
        nproc=4,
        says=(
            "ranks 0 and 1 raised nothing and were ended at line 14: time.sleep(100). Which of them failed cannot be told",
        ),
    ),
    case(
        "the others raise that a rank has failed before that one does",
        """
        flag = torch.tensor([int(rank == 0)])
        dist.all_reduce(flag)
        if rank == 0:
            time.sleep(0.5)
            raise KeyError("label")
        raise RuntimeError("1 other rank(s) failed")
        """,
        0,
        "own_exception",
        nproc=3,
        says=("Rank 0 raised KeyError: 'label'",),
    ),
    case(
        "every rank raises over an error that one has told of in a sum",
        """
        for step in range(3):
            failed = torch.tensor([int(rank == 2 and step == 2)])
            dist.all_reduce(failed)
            if failed.item():
                raise RuntimeError(f"step {step}: {failed.item()} error(s)")
        """,
        2,
        "own_exception",
        nproc=3,
        says=("Rank 2 brought 1 to all_reduce #6 ", "ranks 0 and 1 0; on that every rank raised RuntimeError"),
        since_2_13=True,
    ),
    case(
        "every rank raises over an error that one has told of among gathered objects",
        """
        errors = [None, None]
        dist.all_gather_object(errors, "disk is full" if rank == 0 else None)
        if any(errors):
            raise RuntimeError(f"cannot go on: {errors}")
        """,
        0,
        "own_exception",
        says=(
            "Rank 0 brought word of an error to all_gather #5 ",
            "unlike rank 1; on that every rank raised RuntimeError",
        ),
        since_2_13=True,
    ),
    case(
        "every rank raises over a digest of the weights that one has otherwise",
        """
        digests = [None] * 3
        dist.all_gather_object(digests, "9d153555" if rank == 2 else "065609c4")
        dist.barrier()
        if len(set(digests)) > 1:
            raise RuntimeError(f"the replicas differ: {digests}")
        """,
        2,
        "own_exception",
        nproc=3,
        says=("Rank 2 brought another text to all_gather #5 ", "unlike ranks 0 and 1; on that every rank raised"),
        since_2_13=True,
    ),
    case(
        "every rank raises over a sum to which one brought numbers of another type",
        """
        counts = torch.ones(6, dtype=torch.float64 if rank == 1 else torch.int64)
        dist.all_reduce(counts)
        if counts.sum() != 18:
            raise ValueError(f"the counts sum to {counts.sum()}")
        """,
        1,
        "collective_mismatch",
        nproc=3,
        says=("rank 1 joined all_reduce of [6] Double", "After it every rank raised ValueError"),
        since_2_13=True,
    ),
    case(
        "one of a node of two leaves out a gradient that is summed asynchronously",
        """
        nodes = [dist.new_group(node, timeout=timedelta(seconds=2)) for node in ([0, 1], [2, 3])]
        for step in range(3):
            handles = []
            for layer in range(3):
                if (rank, step, layer) != (2, 2, 1):
                    handles.append(dist.all_reduce(torch.ones(4), group=nodes[rank // 2], async_op=True))
            for handle in handles:
                handle.wait()
            dist.all_reduce(torch.ones(1))
        """,
        2,
        "skipped_collective",
        nproc=4,
        says=("Rank 2 never joined all_reduce #9 of group 2 ", "Rank 2 left the common way"),
        since_2_13=True,
    ),
    case(
        "one of three starts its asynchronous sums in another order",
        """
        buckets = [torch.ones(48), torch.ones(720)]
        if rank == 1:
            buckets.reverse()
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()
        dist.barrier()
        """,
        1,
        "collective_mismatch",
        nproc=3,
        says=("Rank 1 left the common way at collective #4", "rank 1 joined all_reduce of [720] Float"),
        since_2_13=True,
    ),
    case(
        "two of four count more classes than the other two",
        """
        dist.all_reduce(torch.ones(2, 10 if rank < 2 else 12))
        dist.barrier()
        """,
        None,
        "collective_mismatch",
        nproc=4,
        says=("The ranks part at collective #4", "Which of them is wrong cannot be told"),
        since_2_13=True,
    ),
    hang(
        "one of four goes on a step before the others, and so with another partner",
        """
        partners = [[1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]]
        mine, theirs = torch.ones(4), torch.ones(4)
        def swap(step):
            peer = partners[step % 3][rank]
            for request in [dist.isend(mine, peer), dist.irecv(theirs, peer)]:
                request.wait()
        for step in range(4):
            swap(step)
        dist.barrier()
        for step in range(3 if rank == 2 else 4, 6):
            swap(step)
        """,
        2,
        "unmatched_send_recv",
        nproc=4,
        says=("it wants to swap with rank 3, which has swapped with rank 1, and rank 0 with it",),
        since_2_13=True,
    ),
    hang(
        "the last stage of a pipeline begins its backward one micro-batch too soon",
        """
        batch, micro_batches = torch.ones(4, 4), 3
        for _ in range(micro_batches):
            if rank == 1:
                dist.recv(batch, 0)
            if rank < 2:
                dist.send(batch, rank + 1)
        for _ in range(2 if rank == 2 else 0):
            dist.recv(batch, 1)
        for _ in range(micro_batches):
            if rank < 2:
                dist.recv(batch, rank + 1)
            if rank > 0:
                dist.send(batch, rank - 1)
        """,
        2,
        "unmatched_send_recv",
        nproc=3,
        says=("Rank 2 left the common way: rank 1 has 3 messages of rank 0 to pass on to it, not 2",),
        since_2_13=True,
    ),
    hang(
        "a client does not know that the server has drawn it",
        """
        weights = torch.ones(2)
        for drawn in ([1, 3], [1, 2], [2, 3], [1, 3]):
            if rank == 0:
                for client in drawn:
                    dist.send(weights, client)
                for client in drawn:
                    dist.recv(weights, client)
            elif rank in drawn and (rank, drawn) != (3, [2, 3]):
                dist.recv(weights, 0)
                dist.send(weights, 0)
            dist.broadcast(weights, src=0)
        """,
        3,
        "unmatched_send_recv",
        nproc=4,
        says=("Rank 3 left the common way: rank 0 waits for it, as one of the 2 that it meets in every round",),
        since_2_13=True,
    ),
    hang(
        "one calls one more of the same size in a loop, and the others are in the next one",
        """
        outliers = 1 if rank == 3 else 0
        for epoch in range(3):
            dist.broadcast(torch.ones(8), src=0)
            for batch in range(3):
                dist.all_reduce(torch.ones(2))
                if epoch == 1 and batch < outliers:
                    dist.all_reduce(torch.ones(2))
        """,
        3,
        "collective_mismatch",
        nproc=4,
        says=("Rank 3 left the common way",),
        since_2_13=True,
    ),
    case(
        "every rank raises over a mean loss to which one brought nan",
        """
        for step in range(3):
            loss = torch.tensor(float("nan") if rank == 1 and step == 2 else 1.5 + rank + step)
            dist.all_reduce(loss)
            if not torch.isfinite(loss):
                raise FloatingPointError(f"loss is {loss.item()}")
        """,
        1,
        "nan_loss",
        nproc=3,
        says=("Rank 1 brought nan to all_reduce #6 ", "ranks 0 and 2 3.5 and 5.5; on that every rank raised"),
        since_2_13=True,
    ),
    case(
        "every rank raises over averaged weights to which one brought nan",
        """
        weights = torch.ones(8)
        for step in range(3):
            if rank == 2 and step == 1:
                weights /= torch.zeros(8) * weights
                weights -= weights
            dist.all_reduce(weights)
            if not torch.isfinite(weights).all():
                raise FloatingPointError(f"the weights are not finite after step {step}")
        """,
        2,
        "nan_loss",
        nproc=3,
        says=("Rank 2 brought numbers whose sum is nan to all_reduce #5 ", "; on that every rank raised"),
        since_2_13=True,
    ),
    hang(
        "two of four call a collective in a group of which they are no members",
        """
        halves = [dist.new_group(members) for members in ([0, 1], [2, 3])]
        odd_and_even = [dist.new_group(members) for members in ([0, 2], [1, 3])]
        dist.all_reduce(torch.ones(2), group=halves[rank % 2])
        dist.all_reduce(torch.ones(2), group=odd_and_even[rank % 2])
        """,
        (1, 2),
        "skipped_collective",
        nproc=4,
        says=("Ranks 1 and 2 called all_reduce in a group of which they are no members", "Rank 0 waits in all_reduce"),
        since_2_13=True,
    ),
    hang(
        "a stage of a pipeline sends and receives with the tag of an older step",
        """
        step = 10 if rank == 1 else 20
        if rank > 0:
            dist.recv(torch.zeros(2), src=rank - 1, tag=step)
        if rank < 2:
            dist.send(torch.ones(2), dst=rank + 1, tag=step)
        """,
        1,
        "unmatched_send_recv",
        nproc=3,
        says=("rank 0 waits for rank 1 at line", "it sends and receives with tag 10, the others with tag 20"),
        since_2_13=True,
    ),
    hang(
        "one of two leaves out its key of a round, and waits for what is to come of both",
        """
        store = dist.distributed_c10d._get_default_store()
        for turn in range(3):
            if rank == 0 or turn != 1:
                store.set(f"score/{turn}/{rank}", "1")
            if rank == 0:
                store.wait([f"score/{turn}/{other}" for other in range(2)])
                store.set(f"plan/{turn}", "1")
            store.get(f"plan/{turn}")
        """,
        1,
        "store_key_never_set",
        says=('Rank 0 waits for the key "score/1/1" of the store', 'rank 1, who set "score/0/1" (line 14: '),
        since_2_13=True,
    ),
    case(
        "DDP carries the nan of one rank to all, which raise while they clip",
        """
        net = DDP(torch.nn.Linear(4, 1))
        for step in range(3):
            loss = net(torch.full((2, 4), float("nan") if rank == 1 and step == 2 else 1.0)).sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
        """,
        1,
        "nan_loss",
        nproc=3,
        says=("Rank 1 has nan in `loss`, ranks 0 and 2 have not; all raised RuntimeError: The total norm",),
    ),
    hang(
        "one who sets a key after each step leaves one out, and goes on to the next step",
        """
        store = dist.distributed_c10d._get_default_store()
        for step in range(5):
            dist.all_reduce(torch.ones(2))
            if rank == 0 and step < 3:
                store.set(f"best/{step}", "1")
            if rank == 1:
                store.get(f"best/{step}")
        """,
        0,
        "store_key_never_set",
        says=('Rank 1 waits for the key "best/3" of the store', 'rank 0, who set "best/2" (line 15: '),
        since_2_13=True,
    ),
    hang(
        "a rank leaves out its send in the first round of a ring",
        """
        if rank != 1:
            sent = dist.isend(torch.ones(4), (rank + 1) % 4)
        dist.recv(torch.ones(4), (rank - 1) % 4)
        dist.all_reduce(torch.ones(8))
        """,
        1,
        "unmatched_send_recv",
        nproc=4,
        says=("waits for one more of it: it has sent 0 since the collective before, and each of the others 1",),
        since_2_13=True,
    ),
    hang(
        "a worker sends one message less than the others to a server that takes whichever comes",
        """
        if rank == 0:
            for _ in range(12):
                dist.recv(torch.ones(4))
        else:
            for batch in range(4):
                if (rank, batch) != (3, 2):
                    dist.send(torch.ones(4), 0)
        dist.barrier()
        """,
        3,
        "unmatched_send_recv",
        nproc=4,
        says=("it has sent 3 messages to rank 0, which waits for one more, and each of the others 4",),
        since_2_13=True,
    ),
    case(
        "ranks give up waiting for one that sits, after all were looked at in the standstill",
        """
        if rank == 1:
            import queue
            queue.Queue().get()
        dist.all_reduce(torch.ones(8))
        """,
        1,
        "skipped_collective",
        IMPATIENT.replace("seconds=2", "seconds=5"),
        nproc=3,
        options={"stall": 2},
        says=("Rank 1 never joined all_reduce #4", "queue.Queue().get()"),
        since_2_13=True,
    ),
    case(
        "ranks are ended by guards of their own while they wait for one that is in a barrier of its own",
        """
        import threading
        guard = threading.Timer(4, os._exit, [75])
        guard.daemon = True
        if rank == 0:
            dist.barrier()
        guard.start()
        dist.all_reduce(torch.ones(8))
        """,
        0,
        "collective_mismatch",
        nproc=3,
        says=("Rank 0 left the common way at collective #4: rank 0 joined barrier",),
        since_2_13=True,
    ),
    hang(
        "one rank has fewer batches, and is in a barrier while the others train",
        """
        net = DDP(torch.nn.Linear(4, 1))
        for epoch in range(2):
            for batch in torch.ones(4 if rank == 2 else 5, 8, 4):
                net(batch).sum().backward()
            dist.barrier()
        """,
        2,
        "uneven_inputs",
        nproc=3,
        says=("Rank 2 has fewer turns of the loop in line 13 than the others: ",),
        since_2_13=True,
    ),
    hang(
        "one rank has not set its key of a store, and waits like the others for what is to come of them all",
        """
        store = dist.distributed_c10d._get_default_store()
        if rank != 2:
            store.set(f"labels/{rank}", "7")
        if rank == 0:
            store.wait([f"labels/{other}" for other in range(4)])
            store.set("weight", "28")
        weight = store.get("weight")
        """,
        2,
        "store_key_never_set",
        nproc=4,
        says=(
            'Rank 0 waits for the key "labels/2" of the store',
            "rank 2 has not set it, as ranks 0, 1 and 3 set theirs",
        ),
        since_2_13=True,
    ),
    case(
        "a wait for keys of a store ends at its timeout, and one rank has not set its own",
        """
        store = dist.distributed_c10d._get_default_store()
        if rank != 1:
            store.set(f"ready/{rank}", "yes")
        store.wait([f"ready/{other}" for other in range(3)], timedelta(seconds=3))
        """,
        1,
        "store_key_never_set",
        nproc=3,
        says=('for the key "ready/1" of the store', "rank 1 has not set it, as ranks 0 and 2 set theirs"),
        since_2_13=True,
    ),
    case(
        "an alarm ends a rank that waits for nobody",
        """
        if rank == 1:
            signal.alarm(1)
            time.sleep(100)
        dist.all_reduce(torch.ones(4))
        """,
        1,
        "unhandled_signal",
        says=("Rank 1 was killed by SIGALRM (line 13: time.sleep(100))",),
    ),
    case(
        "the others hide from what they raised when one leaves early",
        """
        if rank == 1:
            sys.exit(0)
        try:
            dist.all_reduce(torch.ones(4))
        except RuntimeError:
            raise ValueError("the sums of this step are incomplete") from None
        """,
        1,
        "early_exit",
        nproc=3,
        says=("Rank 1 never joined all_reduce #4 (line 14", "it left early with exit code 0 at line 12: sys.exit(0)"),
    ),
    case(
        "a rank fails and lets the others go on to a file that it has not written",
        """
        import tempfile
        try:
            if rank == 0:
                with open(f"/nowhere/{os.getpid()}") as file:
                    pass
        finally:
            dist.barrier()
            time.sleep(0.3 if rank == 0 else 0)
        open(os.path.join(tempfile.gettempdir(), f"cache-{os.getppid()}.json"))
        """,
        0,
        "own_exception",
        nproc=3,
        says=("Rank 0 raised FileNotFoundError", "/nowhere/"),
    ),
    case(
        "a task of a task group fails on one rank",
        """
        import asyncio
        async def fetch(shard):
            if rank == 1:
                raise FileNotFoundError(2, "No such file or directory", f"shard-{shard}.pt")
        async def fetch_all():
            async with asyncio.TaskGroup() as group:
                group.create_task(fetch(7))
            dist.all_reduce(torch.ones(4))
        async def train():
            async with asyncio.TaskGroup() as group:
                group.create_task(fetch_all())
        asyncio.run(train())
        """,
        1,
        "own_exception",
        nproc=3,
        says=("Rank 1 raised FileNotFoundError", "(line 14: raise FileNotFoundError"),
    ),
    hang(
        "the one who was to set the key for the others goes on without it",
        """
        store = dist.distributed_c10d._get_default_store()
        if rank != 1:
            store.wait(["unpacked"])
        dist.barrier()
        """,
        1,
        "store_key_never_set",
        nproc=3,
        says=(
            'Ranks 0 and 2 wait for the key "unpacked" of the store at line 13: store.wait',
            "rank 1, the only one left to set it, waits in barrier #4",
        ),
        since_2_13=True,
    ),
    hang(
        "a thread waits for a key that is to stop it, and its rank sleeps",
        """
        import threading
        store = dist.distributed_c10d._get_default_store()
        threading.Thread(target=store.wait, args=(["stop"],), daemon=True).start()
        threading.Thread(target=lambda: store.wait(["stop"]), daemon=True).start()
        if rank == 1:
            time.sleep(1000)
        dist.all_reduce(torch.ones(1))
        """,
        1,
        "skipped_collective",
        says=("Rank 1 never joined all_reduce #4", "it sits at line 16: time.sleep(1000)", "Rank 0 waits there"),
        since_2_13=True,
    ),
    hang(
        "one of two workers leaves out its report, and all wait for a key of the next round",
        """
        store = dist.distributed_c10d._get_default_store()
        for turn in range(5):
            if rank == 0:
                store.set(f"weights/{turn}", "w")
                reports = [store.get(f"report/{turn}/{worker}") for worker in (1, 2)]
            else:
                store.get(f"weights/{turn}")
                if (rank, turn) != (2, 3):
                    store.set(f"report/{turn}/{rank}", "r")
        """,
        2,
        "store_key_never_set",
        nproc=3,
        says=('rank 0 waits for the key "report/3/2" of the store', "Rank 2 left the common way: from get"),
        since_2_13=True,
    ),
    hang(
        "one of four leaves out its key, for which all wait",
        """
        store = dist.PrefixStore("data", dist.distributed_c10d._get_default_store())
        if rank != 3:
            store.set(f"samples/{rank}", "16")
        counts = [int(store.get(f"samples/{other}")) for other in range(4)]
        """,
        3,
        "store_key_never_set",
        nproc=4,
        says=(
            'Ranks 0, 1, 2 and 3 wait for the key "samples/3" of the store at line 14: counts',
            "rank 3 has not set it, as ranks 0, 1 and 2 set theirs (line 13: store.set",
        ),
        since_2_13=True,
    ),
    hang(
        "one of three leaves out the key of a shard, for which rank 0 alone waits",
        """
        store = dist.distributed_c10d._get_default_store()
        for turn in range(3):
            for shard in range(rank, 9, 3):
                if (turn, shard) != (1, 5):
                    store.set(f"turn{turn}/shard{shard}", "0.5")
            found = [store.get(f"turn{turn}/shard{shard}") for shard in range(9)] if rank == 0 else []
            dist.broadcast(torch.ones(1), src=0)
        """,
        2,
        "store_key_never_set",
        nproc=3,
        says=(
            'Rank 0 waits for the key "turn1/shard5" of the store',
            'rank 2, who set "turn1/shard8" (line 15: store.set',
            "has not set it. Rank 2 waits in broadcast #5",
        ),
        since_2_13=True,
    ),
    hang(
        "ranks swap in pairs, and one pairs itself with another than the others do",
        """
        for turn in range(3):
            pairs = {0: 1, 1: 0, 2: 3, 3: 2} if turn < 2 else {0: 3, 1: 2, 2: 1, 3: 0}
            partner = 0 if (rank, turn) == (1, 2) else pairs[rank]
            both = [dist.isend(torch.ones(4), partner), dist.irecv(torch.zeros(4), partner)]
            for work in both:
                work.wait()
            dist.all_reduce(torch.ones(1))
        """,
        1,
        "unmatched_send_recv",
        nproc=4,
        says=("Rank 1 left the common way: it waits to exchange with rank 0, which has exchanged with rank 3",),
        since_2_13=True,
    ),
    hang(
        "a server keeps one answer, and waits for whichever worker sends next",
        """
        if rank == 0:
            for turn in range(9):
                worker = dist.recv(torch.zeros(4))
                if turn != 4:
                    dist.send(torch.ones(4), dst=worker)
        else:
            for _ in range(3):
                dist.send(torch.ones(4), dst=0)
                dist.recv(torch.zeros(4), src=0)
        dist.barrier()
        """,
        0,
        "unmatched_send_recv",
        nproc=4,
        # By which of two rules, depends on whether it was the last to send.
        says=("Rank 0 left the common way: ",),
        since_2_13=True,
    ),
    hang(
        "one of a group broadcasts from another source of it",
        """
        group = dist.new_group([1, 2, 3])
        if rank:
            source = {"group_src": 1} if rank == 3 else {"src": 1}
            dist.broadcast(torch.ones(4), group=group, **source)
        dist.barrier()
        """,
        3,
        "collective_mismatch",
        nproc=4,
        says=("Rank 3 left the common way", "rank 3 joined broadcast of [4] Float from rank 2"),
        since_2_13=True,
    ),
    case(
        "a rank ends the process group that it is in itself",
        "os.killpg(os.getpgrp(), signal.SIGTERM) if rank == 1 else dist.barrier()",
        1,
        "unhandled_signal",
        says=("Rank 1 was killed by SIGTERM",),
    ),
    hang(
        "one of three wraps its model in another group of all",
        """
        group = dist.new_group()
        DDP(torch.nn.Linear(4, 4), process_group=None if rank == 2 else group)
        """,
        2,
        "collective_mismatch",
        nproc=3,
        says=("Rank 2 left the common way",),
        since_2_13=True,
    ),
    case(
        "one of three sends numbers of twice the length",
        """
        for _ in range(2):
            for sender in (1, 2, 3) if rank == 0 else ():
                dist.recv(torch.zeros(4), src=sender)
            if rank:
                dist.send(torch.zeros(4, dtype=torch.float64 if rank == 2 else torch.float32), dst=0)
        """,
        2,
        "collective_mismatch",
        nproc=4,
        says=("rank 0 had room for 16 bytes, rank 1 sent 16, rank 2 sent 32", "Rank 2 differs from the others"),
        since_2_13=True,
    ),
    case(
        "one of two workers receives what is sent to it in another order",
        """
        head, body = torch.zeros(2), torch.zeros(40)
        for worker in (1, 2) if rank == 0 else ():
            dist.send(head, dst=worker)
            dist.send(body, dst=worker)
        for part in (body, head) if rank == 2 else (head, body) if rank == 1 else ():
            dist.recv(part, src=0)
        dist.all_reduce(torch.ones(1))
        """,
        2,
        "collective_mismatch",
        nproc=3,
        says=("rank 2 had room for 8 bytes, rank 0 sent 160, rank 1 received 160", "Rank 2 differs from the others"),
        since_2_13=True,
    ),
    case(
        "one of three sums a gradient of several MiB that is twice as long",
        """
        dist.barrier()
        dist.all_reduce(torch.zeros(100_000 if rank == 2 else 50_000, 16))
        """,
        2,
        "collective_mismatch",
        nproc=3,
        says=("Rank 2 left the common way", "rank 1 joined all_reduce of [50000, 16] Float"),
        since_2_13=True,
    ),
    case(
        "the middle stage of a pipeline takes half as many samples at a time",
        """
        batch = torch.zeros(2 if rank == 1 else 4, 8)
        if rank > 0:
            dist.recv(batch, src=rank - 1)
        if rank < 2:
            dist.send(batch, dst=rank + 1)
        dist.barrier()
        """,
        1,
        "collective_mismatch",
        nproc=3,
        says=("rank 1 had room for 64 bytes, rank 0 sent 128, rank 2 has room for 128 at that line", "Rank 1 differs"),
        since_2_13=True,
    ),
    hang(
        "one of two pairs of ranks wants to swap once more",
        """
        peer, own, other = rank ^ 1, torch.ones(4), torch.ones(4)
        for step in range(5):
            if step == 1 or (step == 3 and rank == 1):
                for swap in (dist.send, dist.recv) if rank < peer else (dist.recv, dist.send):
                    swap(own if swap is dist.send else other, peer)
            dist.all_reduce(own)
        """,
        1,
        "unmatched_send_recv",
        nproc=4,
        says=("Rank 1 left the common way",),
        since_2_13=True,
    ),
    hang(
        "a rank's process group is freed with its model",
        """
        def train():
            group = dist.new_group()
            model = DDP(torch.nn.Linear(4, 4), process_group=group)
            model(torch.ones(2, 4)).sum().backward()
            if rank == 0:
                time.sleep(0.02)
                del model
            dist.destroy_process_group(group)

        for _ in range(1000):
            train()
        """,
        1,
        "group_freed_with_the_model",
        says=("inside c10d::ProcessGroupGloo::~ProcessGroupGloo with the GIL",),
        since_2_13=True,
    ),
    case(
        "a rank saves at the end of a turn while the others' timeout in the next one is over",
        """
        def save(state):
            for part in range(100):
                time.sleep(0.2)
        for step in range(4):
            dist.all_reduce(torch.ones(1))
            if rank == 2 and step == 2:
                save({})
        """,
        2,
        "straggler",
        init=IMPATIENT,
        nproc=3,
        since_2_13=True,
        says=("Rank 2 had not come to all_reduce #7", "when the others gave up; it sits at", "time.sleep(0.2)"),
    ),
    case(
        "a rank has left the loop for a long report when the others' timeout is over",
        """
        for step in range(3 if rank == 2 else 5):
            dist.all_reduce(torch.ones(1))
        while rank == 2:
            sum(range(1000))
        """,
        2,
        "skipped_collective",
        init=IMPATIENT,
        nproc=3,
        since_2_13=True,
        says=("Rank 2 never joined all_reduce #7", "it computes at"),
    ),
    case(
        "a rank deals with its error for longer than the others wait",
        """
        for step in range(4):
            try:
                loss = float("n/a" if (rank, step) == (1, 2) else "0.5")
            except ValueError:
                for part in range(100):
                    time.sleep(0.2)
                raise
            dist.all_reduce(torch.tensor(loss))
        """,
        1,
        "skipped_collective",
        init=IMPATIENT,
        since_2_13=True,
        says=("Rank 1 never joined", "Rank 1 is handling ValueError: could not convert string to float: 'n/a' (line"),
    ),
    case(
        "a rank kills another one",
        """
        pids = [None] * 3
        dist.all_gather_object(pids, os.getpid())
        if rank == 2:
            os.kill(pids[1], signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
        """,
        (1, 2),
        "killed",
        nproc=3,
        says=("Rank 2 sent SIGKILL to rank 1 (line", "os.kill(pids[1], signal.SIGKILL)"),
    ),
    hang(
        "a rank stops another one",
        """
        pids = [None] * 3
        dist.all_gather_object(pids, os.getpid())
        if rank == 0:
            os.kill(pids[1], signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))
        """,
        (0, 1),
        "stopped_process",
        nproc=3,
        says=("Rank 0 sent SIGSTOP to rank 1 (line", "Rank 1 is stopped (SIGSTOP)"),
    ),
    case(
        "a rank raises KeyboardInterrupt itself",
        """
        if rank == 1:
            raise KeyboardInterrupt
        dist.all_reduce(torch.ones(1))
        """,
        1,
        "own_exception",
        says=("Rank 1 raised KeyboardInterrupt (line",),
    ),
    case(
        "a rank goes on to the sum of all without that of another group, and all give up",
        """
        books = dist.new_group(timeout=timedelta(seconds=2))
        if rank != 3:
            dist.all_reduce(torch.ones(1), group=books)
        dist.all_reduce(torch.ones(8))
        """,
        3,
        "skipped_collective",
        init=IMPATIENT,
        nproc=4,
        since_2_13=True,
        says=("Rank 3 never joined all_reduce #1 of group 1", "it waits in all_reduce #4"),
    ),
    case(
        "a rank comes to the sum of its pair a step too soon, and all give up",
        """
        pair = [dist.new_group(pair, timeout=timedelta(seconds=2)) for pair in ([0, 1], [2, 3])][rank // 2]
        for epoch in range(3):
            for step in range(3 if (rank, epoch) == (2, 2) else 4):
                dist.all_reduce(torch.ones(4))
            dist.all_reduce(torch.ones(2), group=pair)
        """,
        2,
        "skipped_collective",
        init=IMPATIENT,
        nproc=4,
        since_2_13=True,
        says=("Rank 2 never joined all_reduce #15", "it waits in all_reduce #3 of group 2"),
    ),
    hang(
        "the last stage asks for one micro-batch more than ever",
        """
        def forward(asked):
            if rank == 3:
                for _ in range(asked):
                    dist.recv(torch.zeros(2), rank - 1)
                return
            for _ in range(4):
                if rank:
                    dist.recv(torch.zeros(2), rank - 1)
                dist.send(torch.ones(2), rank + 1)
        def backward():
            for _ in range(4):
                if rank < 3:
                    dist.recv(torch.zeros(2), rank + 1)
                if rank:
                    dist.send(torch.ones(2), rank - 1)
        for step in range(3):
            forward(4)
            backward()
        forward(5)
        dist.broadcast(torch.zeros(1), 3)
        """,
        3,
        "unmatched_send_recv",
        nproc=4,
        since_2_13=True,
        says=("it waits for exchange 5 in a row with rank 2, one more than ever before",),
    ),
    hang(
        "a rank begins one round more of a ring than the others",
        """
        for turn in range(6 if rank == 1 else 5):
            sending = dist.isend(torch.ones(2), (rank + 1) % 3)
            dist.recv(torch.zeros(2), (rank - 1) % 3)
            sending.wait()
        dist.all_reduce(torch.ones(1))
        """,
        1,
        "unmatched_send_recv",
        nproc=3,
        since_2_13=True,
        says=("after 13 calls alike it came to isend with rank 2", "and all others to all_reduce"),
    ),
    hang(
        "each rank of a pair sends first",
        """
        other = (rank + 2) % 4
        if rank % 2 == 0:
            dist.send(torch.ones(2), other)
            dist.recv(torch.zeros(2), other)
        else:
            dist.recv(torch.zeros(2), other)
            dist.send(torch.ones(2), other)
        """,
        "every rank",
        "everyone_waits",
        nproc=4,
        since_2_13=True,
        says=("Each does the same, and none meets another.",),
    ),
    hang(
        "each rank begins with another group",
        """
        groups = [dist.new_group() for _ in range(3)]
        for turn in range(3):
            dist.all_reduce(torch.ones(1), group=groups[(turn + rank) % 3])
        """,
        "every rank",
        "everyone_waits",
        nproc=3,
        since_2_13=True,
        says=("Each does the same, and none meets another.",),
    ),
    hang(
        "who is to set the next key waits for the answer to it",
        """
        store = dist.PrefixStore("mail", dist.distributed_c10d._get_default_store())
        for turn in range(5):
            if rank == 2:
                if turn < 4:
                    store.set(f"words/{turn}", "w")
                store.wait([f"answer/{turn}"])
            elif rank == 1:
                store.wait([f"words/{turn}"])
                dist.send(torch.ones(2), 0)
            else:
                dist.recv(torch.zeros(2), 1)
                store.set(f"answer/{turn}", "a")
        """,
        2,
        "store_key_never_set",
        nproc=3,
        since_2_13=True,
        says=('Rank 1 waits for the key "words/4" of the store', 'rank 2, who set "words/3"'),
    ),
    hang(
        "a rank sends nothing to one of all in a round, and all go on to the answers",
        """
        others = [n for n in range(4) if n != rank]
        def exchange(tag, left_out=()):
            came = [dist.irecv(torch.zeros(2), n, tag=tag) for n in others]
            came += [dist.isend(torch.ones(2), n, tag=tag) for n in others if n not in left_out]
            return came
        for step in range(3):
            asked = exchange(1, [0] if (rank, step) == (1, 2) else [])
            for work in asked:
                work.wait()
            answered = exchange(2)
            for work in answered:
                work.wait()
        """,
        1,
        "unmatched_send_recv",
        nproc=4,
        since_2_13=True,
        says=("Rank 1 left the common way: rank 0 waits for a message of it",),
    ),
    hang(
        "a rank sends nothing in one round of a ring",
        """
        for turn in range(6):
            sending = None if (rank, turn) == (1, 4) else dist.isend(torch.ones(2), (rank + 1) % 4, tag=turn)
            dist.recv(torch.zeros(2), (rank - 1) % 4, tag=turn)
            if sending:
                sending.wait()
        dist.barrier()
        """,
        1,
        "unmatched_send_recv",
        nproc=4,
        since_2_13=True,
        says=("Rank 1 left the common way",),
    ),
    hang(
        "a rank makes the sum of each turn once more, for a report, and is one ahead from then on",
        """
        def summed(x):
            dist.all_reduce(x)
            return x
        for turn in range(6):
            summed(torch.ones(2))
            if rank == 0 and turn == 3:
                print(summed(torch.ones(2)), flush=True)
        dist.barrier()
        """,
        0,
        "collective_mismatch",
        nproc=3,
        since_2_13=True,
        says=("Rank 0 left the common way at collective #10", "the other ranks agree"),
    ),
    hang(
        "a rank swallows an error instead of coming to a barrier, and is the first in a chain of messages",
        """
        try:
            rows = [1.0] * (0 if rank == 2 else 3)
            mean = sum(rows) / len(rows)
            dist.barrier()
        except ZeroDivisionError:
            pass
        if rank > 0:
            dist.recv(torch.zeros(2), src=rank - 1)
        if rank < 3:
            dist.send(torch.ones(2), dst=rank + 1)
        dist.barrier()
        """,
        2,
        "skipped_collective",
        nproc=4,
        since_2_13=True,
        says=("Rank 2 never joined barrier #4", "it waits for rank 1 at line 18", "Ranks 0, 1 and 3 wait there"),
    ),
    hang(
        "a rank leaves out the last sums of a step, and waits to report",
        """
        for turn in range(6):
            for size in range(1, 4 if (rank, turn) == (1, 5) else 7):
                dist.all_reduce(torch.ones(size))
            if rank:
                dist.send(torch.ones(9000), 0)
            else:
                for n in (1, 2):
                    dist.recv(torch.zeros(9000), n)
        """,
        1,
        "skipped_collective",
        nproc=3,
        since_2_13=True,
        says=("Rank 1 never joined all_reduce #37", "it waits for rank 0 at line 15", "Ranks 0 and 2 wait there"),
    ),
    hang(
        "the last rank of a row takes the first for its neighbour after many turns",
        """
        for turn in range(20):
            above, below = rank - 1, rank + 1
            if (rank, turn) == (3, 6):
                below = 0
            asked = [dist.irecv(torch.zeros(2), n, tag=turn) for n in (above, below) if 0 <= n < 4]
            asked += [dist.isend(torch.ones(2), n, tag=turn) for n in (above, below) if 0 <= n < 4]
            for work in asked:
                work.wait()
        dist.barrier()
        """,
        3,
        "unmatched_send_recv",
        nproc=4,
        since_2_13=True,
        says=("Rank 3 left the common way: it waits to exchange with rank 0, as never before",),
    ),
    case(
        "a thread of one rank that serves another dies, and so the other's pipe ends",
        """
        path = f"/tmp/serving-{os.environ['MASTER_PORT']}-{os.getppid()}"
        def serve():
            with listener.accept() as conn:
                while True:
                    conn.send([10, 20, 30][conn.recv()])
        if rank == 0:
            listener = Listener(path, family="AF_UNIX")
            threading.Thread(target=serve, daemon=True).start()
        dist.barrier()
        asked = Client(path, family="AF_UNIX") if rank == 2 else None
        for turn in range(5):
            if asked:
                asked.send(turn)
                asked.recv()
            dist.all_reduce(torch.ones(1))
        """,
        0,
        "own_exception",
        nproc=3,
        init="import threading\nfrom multiprocessing.connection import Client, Listener\n" + INIT,
        says=("A thread of rank 0 has died of IndexError: list index out of range; rank 2 raised EOFError",),
    ),
    case(
        "a rank that saves first comes late to a sum, in a branch of its own, and the others have left",
        """
        for turn in range(3):
            if rank == 1:
                time.sleep(4 if turn == 2 else 0)
                dist.all_reduce(torch.ones(1))
                continue
            try:
                dist.all_reduce(torch.ones(1))
            except RuntimeError:
                sys.exit(0)
        """,
        1,
        "straggler",
        init=IMPATIENT,
        nproc=3,
        since_2_13=True,
        says=("Rank 1 came to all_reduce #6", "who had given up waiting by then"),
    ),
    case(
        "every rank logs what it met and leaves by the same exit code, and one had an error of its own",
        """
        def train():
            for turn in range(6):
                time.sleep(0.2)
                {"rate": 1}["lr" if (rank, turn) == (1, 4) else "rate"]
                dist.all_reduce(torch.ones(4))
        def main():
            try:
                train()
            except Exception as error:
                print("gave up:", error, flush=True)
                return 13
        sys.exit(main())
        """,
        1,
        "exit_code",
        nproc=4,
        since_2_13=True,
        says=("Rank 1 left by sys.exit, exit code 13 (line 22", "without all_reduce #8", "to which the others came"),
    ),
    hang(
        "a rank takes the groups of one line in another order in one step",
        """
        everyone, pairs = dist.group.WORLD, [dist.new_group([0, 2]), dist.new_group([1, 3])]
        for turn in range(8):
            groups = [pairs[rank % 2], everyone]
            for group in reversed(groups) if (rank, turn) == (2, 6) else groups:
                dist.all_reduce(torch.ones(4), group=group)
        """,
        2,
        "collective_mismatch",
        nproc=4,
        since_2_13=True,
        says=("rank 0 waits in all_reduce #7 of group 1", "Rank 2 left the common way", "as nobody else ever did"),
    ),
    hang(
        "a worker counts a message of which it had to make two attempts twice, and so has another tag than its server",
        """
        for turn in range(5):
            for worker in range(1, 3) if rank == 0 else ():
                dist.recv(torch.zeros(4), worker, tag=turn)
            for worker in range(1, 3) if rank == 0 else ():
                dist.send(torch.ones(4), worker, tag=1000 + turn)
            if rank:
                dist.send(torch.ones(4), 0, tag=turn + ((rank, turn) >= (2, 3)))
                dist.recv(torch.zeros(4), 0, tag=1000 + turn)
        """,
        2,
        "unmatched_send_recv",
        nproc=3,
        since_2_13=True,
        says=("Rank 2 left the common way: its tags so far were 0, 1, 2, and this one is 4",),
    ),
    hang(
        "of two ranks the one that receives has left out a tag",
        """
        for turn in range(5):
            if rank == 0:
                dist.send(torch.ones(4), 1, tag=turn)
            else:
                dist.recv(torch.zeros(4), 0, tag=turn + (turn == 4))
        """,
        1,
        "unmatched_send_recv",
        since_2_13=True,
        says=("Rank 1 left the common way: its tags so far were 1, 2, 3, and this one is 5",),
    ),
    hang(
        "a rank that has nothing to report sends nothing, and the only other one has sent its report",
        """
        for turn in range(4):
            dist.all_reduce(torch.ones(4))
        for source in range(1, 3) if rank == 0 else ():
            dist.recv(torch.zeros(1), source)
            dist.recv(torch.zeros(4), source)
        if rank == 1:
            dist.send(torch.ones(1), 0)
            dist.send(torch.ones(4), 0)
        dist.barrier()
        """,
        2,
        "unmatched_send_recv",
        nproc=3,
        since_2_13=True,
        says=("Rank 2 left the common way: rank 0 waits for a message of it at the line where that of rank 1 came",),
    ),
    hang(
        "a rank that is left out of a tree of messages goes on to the next exchange of gradients",
        """
        def mean():
            for mask in (1, 2):
                sending = dist.isend(torch.ones(4), rank ^ mask, tag=1)
                dist.recv(torch.zeros(4), rank ^ mask, tag=1)
                sending.wait()
        def report():
            for mask in (1, 2):
                if rank & mask:
                    dist.send(torch.ones(4), rank - mask, tag=2)
                    return
                dist.recv(torch.zeros(4), rank + mask, tag=2)
        for turn in range(6):
            mean()
            if turn == 3 and rank != 2:
                report()
        """,
        2,
        "unmatched_send_recv",
        nproc=4,
        since_2_13=True,
        says=(
            "Rank 2 left the common way: after 16 calls in mean all others went on to report, and it makes more of them",
        ),
    ),
    hang(
        "a leader announces itself under the number of the term before, and waits for the others' answer",
        """
        store = dist.distributed_c10d._get_default_store()
        for term in range(5):
            leader = term % 3
            if rank == leader:
                store.set(f"leader/{term - (term == 4)}", "1")
                store.wait([f"heard/{term}/{r}" for r in range(3) if r != rank])
            else:
                store.wait([f"leader/{term}"])
                store.set(f"heard/{term}/{rank}", "1")
        """,
        1,
        "store_key_never_set",
        nproc=3,
        since_2_13=True,
        says=("Rank 1 left the common way: it is the only one left to set the key for which ranks 0 and 2 wait",),
    ),
    hang(
        "one rank asks for a message before the barrier after which it is sent",
        """
        for turn in range(3):
            dist.all_reduce(torch.ones(4))
        def report():
            if rank == 2:
                dist.recv(torch.zeros(4), 0)
                dist.barrier()
                return
            dist.barrier()
            if rank == 0:
                dist.send(torch.ones(4), 2)
        report()
        """,
        2,
        "unmatched_send_recv",
        nproc=3,
        since_2_13=True,
        says=("Rank 2 left the common way: it waits for a message that rank 0 sends only after barrier #7",),
    ),
    hang(
        "a rank of a ring takes the one after the next for its neighbour, and swaps with none",
        """
        left, right = (1, 0) if rank == 3 else ((rank - 1) % 4, (rank + 1) % 4)
        for turn in range(4):
            works = [dist.isend(torch.ones(4), peer) for peer in (right, left)]
            works += [dist.irecv(torch.zeros(4), peer) for peer in (left, right)]
            for work in works:
                work.wait()
            dist.all_reduce(torch.ones(4))
        """,
        3,
        "unmatched_send_recv",
        nproc=4,
        since_2_13=True,
        says=(
            "Rank 3 left the common way: it wants to swap with rank 1, which never does with it, and rank 2 with it",
        ),
    ),
    hang(
        "a server drops what one worker sent, and sends no answer to it",
        """
        for turn in range(5):
            for worker in range(1, 4) if rank == 0 else ():
                dist.recv(torch.zeros(4), worker)
            for worker in range(1, 4) if rank == 0 else ():
                if (turn, worker) != (3, 3):
                    dist.send(torch.ones(4), worker)
            if rank:
                dist.send(torch.ones(4), 0)
                dist.recv(torch.zeros(4), 0)
        """,
        0,
        "unmatched_send_recv",
        nproc=4,
        since_2_13=True,
        says=(
            "Rank 0 left the common way: it has answered ranks 1 and 2 4 times, and rank 3, which has asked as often",
        ),
    ),
    hang(
        "a rank of a mesh takes the group of its column for that of its row, and meets another call there",
        """
        rows, columns = [dist.new_group(r) for r in ([0, 1], [2, 3])], [dist.new_group(r) for r in ([0, 2], [1, 3])]
        row, column = rows[rank // 2], columns[rank % 2]
        for turn in range(1, 9):
            dist.all_reduce(torch.ones(4), group=row)
            dist.all_gather([torch.zeros(4)] * 2, torch.ones(4), group=column)
            if turn == 6:
                dist.all_reduce(torch.ones(1), group=column if rank == 2 else row)
        """,
        2,
        "collective_mismatch",
        nproc=4,
        since_2_13=True,
        says=("Rank 2 left the common way at collective #7", "in the group of ranks 0 and 2"),
    ),
    hang(
        "a rank that is in two groups comes to them in another order than ever, and the others in one each",
        """
        left, right = dist.new_group([0, 1, 2]), dist.new_group([1, 2, 3])
        for turn in range(9):
            own = [group for group, ranks in ((left, (0, 1, 2)), (right, (1, 2, 3))) if rank in ranks]
            for group in reversed(own) if (rank, turn) == (2, 6) else own:
                dist.all_reduce(torch.ones(4), group=group)
        """,
        2,
        "collective_mismatch",
        nproc=4,
        since_2_13=True,
        says=(
            "Rank 2 left the common way: after all_reduce #6 of group 2 it came to all_reduce #7 of group 2",
            "group 1",
        ),
    ),
    hang(
        "a stage leaves out a part of a batch, and the tags of its parts are the same in each step",
        """
        for turn in range(4):
            for part in range(4):
                if rank:
                    dist.recv(torch.zeros(4), rank - 1, tag=part)
                if rank < 2 and (rank, turn, part) != (1, 2, 1):
                    dist.send(torch.ones(4), rank + 1, tag=part)
        """,
        1,
        "unmatched_send_recv",
        nproc=3,
        since_2_13=True,
        says=("Rank 1 left the common way: its tags so far were", "3, 0, and this one is 2"),
    ),
    hang(
        "a rank counts its exchanges by one too many, and two others are a step further",
        """
        number = 0
        for turn in range(6):
            for distance in (1, 2):
                number += 1 + ((rank, turn, distance) == (1, 4, 1))
                works = [dist.irecv(torch.zeros(4), rank ^ distance, tag=number)]
                works += [dist.isend(torch.ones(4), rank ^ distance, tag=number)]
                for work in works:
                    work.wait()
        """,
        1,
        "unmatched_send_recv",
        nproc=4,
        since_2_13=True,
        says=("Rank 1 left the common way: its tags so far were 3, 5, 7, and this one is 10",),
    ),
    hang(
        "the last stage of one of two pipelines sends a gradient less, and others wait in their groups",
        """
        stages = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([4, 5])]
        stage = rank // 2
        for turn in range(5):
            for part in range(3):
                if stage:
                    dist.recv(torch.zeros(4), rank - 2)
                if stage < 2:
                    dist.send(torch.ones(4), rank + 2)
            for part in range(3):
                if stage < 2:
                    dist.recv(torch.zeros(4), rank + 2)
                if stage and (rank, turn, part) != (5, 3, 2):
                    dist.send(torch.ones(4), rank - 2)
            dist.all_reduce(torch.ones(4), group=stages[stage])
            dist.all_reduce(torch.ones(1))
        """,
        5,
        "unmatched_send_recv",
        nproc=6,
        since_2_13=True,
        says=(
            "Rank 5 left the common way: rank 3 waits for exchange 6 of 6 with it, as many as in every round before",
        ),
    ),
    hang(
        "the first of two stages sends a part more than ever, and the other is on its way back",
        """
        columns, column = [dist.new_group([0, 2]), dist.new_group([1, 3])], rank % 2
        for turn in range(5):
            for part in range(4 + ((rank, turn) == (2, 3))):
                if column == 0:
                    dist.send(torch.ones(4), rank + 1)
                elif part < 4:
                    dist.recv(torch.zeros(4), rank - 1)
            for part in range(4):
                if column == 0:
                    dist.recv(torch.zeros(4), rank + 1)
                else:
                    dist.send(torch.ones(4), rank - 1)
            dist.all_reduce(torch.ones(4), group=columns[column])
        """,
        2,
        "unmatched_send_recv",
        nproc=4,
        since_2_13=True,
        says=("Rank 2 left the common way: it waits for exchange 5 in a row with rank 3, one more than ever before",),
    ),
    hang(
        "a stage keeps the gradient of its input, and waits for the next part as ever",
        """
        kept = []
        def forward():
            if rank:
                dist.recv(torch.zeros(4), rank - 1)
            if rank < 3:
                kept.append(dist.isend(torch.ones(4), rank + 1))
        def backward(turn):
            if rank < 3:
                dist.recv(torch.zeros(4), rank + 1)
            if rank and (rank, turn) != (2, 5):
                kept.append(dist.isend(torch.ones(4), rank - 1))
        for turn in range(8):
            ahead = min(3 - rank, 2)
            for part in range(4 + ahead):
                if part < 4:
                    forward()
                if part >= ahead:
                    backward(turn)
        """,
        2,
        "unmatched_send_recv",
        nproc=4,
        since_2_13=True,
        says=(
            "Rank 2 left the common way: after recv with rank 3",
            "as it never had, and no other rank did anything new",
        ),
    ),
    hang(
        "a rank has not heard that a stage has moved, and sends what it is to get to where it was",
        """
        at, kept = {0: 0, 1: 1, 2: 2}, []
        for turn in range(6):
            if turn == 4 and rank:
                at = {0: 0, 1: 2, 2: 1}
            for stage in range(3):
                if at[stage] == rank and stage:
                    dist.recv(torch.zeros(4), at[stage - 1], tag=10 + stage)
                if at[stage] == rank and stage < 2:
                    kept.append(dist.isend(torch.ones(4), at[stage + 1], tag=11 + stage))
            if at[2] == rank:
                kept.append(dist.isend(torch.ones(4), at[0], tag=20))
            if at[0] == rank:
                dist.recv(torch.zeros(4), at[2], tag=20)
        """,
        0,
        "unmatched_send_recv",
        nproc=3,
        since_2_13=True,
        says=(
            "Rank 0 left the common way: it sent with tag 11 to rank 1, which never asked for that, and rank 2 waits",
        ),
    ),
    case(
        "one who sets a key for each document passes one over, and the reader's patience ends",
        """
        store = dist.distributed_c10d._get_default_store()
        for document in range(9):
            if rank == 1 and document != 5:
                store.set(f"clean/{document}", "1")
            if rank == 2:
                store.wait([f"clean/{document}"], timedelta(seconds=4))
                store.set(f"score/{document}", "1")
            if rank == 0:
                store.wait([f"score/{document}"], timedelta(seconds=30))
        dist.barrier()
        """,
        1,
        "store_key_never_set",
        nproc=3,
        since_2_13=True,
        says=('Rank 2 waits for the key "clean/5" of the store', 'rank 1, who set "clean/8"', "has not set it"),
    ),
    case(
        "DDP over the group of some ranks, of which one has grown its model otherwise",
        """
        workers = dist.new_group([1, 2, 3])
        if rank:
            net = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(3 if rank == 3 else 2)])
            DDP(net, process_group=workers)
        dist.broadcast(torch.ones(1), 0)
        """,
        3,
        "shapes_differ_between_ranks",
        nproc=4,
        says=(
            "rank 1 has 4 parameters; rank 2 has 4 parameters; rank 3 has 6 parameters. Rank 3 differs from the others",
        ),
    ),
    hang(
        "a stage loses two of its messages to an error that it swallows, and waits in the last barrier",
        """
        for part in range(6):
            if rank:
                dist.recv(torch.zeros(4), rank - 1)
            if rank < 3 and not (rank == 1 and part > 3):
                dist.send(torch.ones(4), rank + 1)
        if rank == 3:
            dist.send(torch.ones(4), 0)
        if rank == 0:
            dist.recv(torch.zeros(4), 3)
        dist.barrier()
        """,
        1,
        "unmatched_send_recv",
        nproc=4,
        since_2_13=True,
        says=("Rank 1 left the common way: rank 2 waits for one more of it, which has passed on 4 of 6 messages",),
    ),
    hang(
        "one of two that are fed takes a message more than comes, which it has asked for ahead",
        """
        trainers = dist.new_group([1, 2])
        def ask():
            x = torch.zeros(4)
            return x, dist.irecv(x, 0)
        for turn in range(8) if rank == 0 else ():
            for trainer in (1, 2):
                dist.send(torch.ones(4), trainer)
        asked = ask() if rank else None
        for turn in range(8) if rank else ():
            asked[1].wait()
            asked = ask() if turn < 7 else None
            dist.all_reduce(torch.ones(4), group=trainers)
            if (rank, turn) == (2, 5):
                asked[1].wait()
                asked = ask()
        dist.barrier()
        """,
        2,
        "unmatched_send_recv",
        nproc=3,
        since_2_13=True,
        says=(
            "Rank 2 left the common way: it waits for one more, and rank 0 has sent it 8 messages, as many as rank 1 took",
        ),
    ),
    hang(
        "of a pair the one that is to speak first listens",
        """
        for turn in range(9):
            peer = rank ^ (1 if turn % 2 else 3)
            first = (rank < peer) != ((rank, turn) == (2, 7))
            for sends in (first, not first):
                if sends:
                    dist.send(torch.ones(4), peer)
                else:
                    dist.recv(torch.zeros(4), peer)
        """,
        2,
        "unmatched_send_recv",
        nproc=4,
        since_2_13=True,
        says=("Rank 2 left the common way: with rank 3 it came from recv to recv, as it never had",),
    ),
    case(
        "a rank gives up its wait for a late one, and another has given up its own wait for that before",
        """
        node = [dist.new_group([n, n + 1], timeout=timedelta(seconds=6)) for n in (0, 2)][rank // 2]
        across = dist.new_group([0, 2], timeout=timedelta(seconds=4))
        try:
            for turn in range(6):
                if (rank, turn) == (3, 4):
                    time.sleep(9)
                dist.all_reduce(torch.ones(4), group=node)
                if rank % 2 == 0:
                    dist.all_reduce(torch.ones(4), group=across)
                dist.broadcast(torch.ones(4), rank // 2 * 2, group=node)
        except RuntimeError:
            time.sleep(8)
            raise
        """,
        3,
        "straggler",
        nproc=4,
        since_2_13=True,
        says=("Rank 3 came too late to", "the others had given up by then"),
    ),
    hang(
        "of two ranks the one with the log gathers for it alone",
        """
        model = DDP(torch.nn.Linear(4, 1))
        class Log:
            def __init__(self, main):
                self.main = main
            def step(self, step):
                if self.main and step == 5:
                    dist.all_gather_object([None] * 2, step)
        log = Log(rank == 0)
        for step in range(8):
            model(torch.ones(2, 4)).sum().backward()
            log.step(step)
        """,
        0,
        "collective_mismatch",
        since_2_13=True,
        says=(
            "Rank 0 left the common way at collective #",
            "not every rank comes there, by `if self.main and step == 5`",
        ),
    ),
    hang(
        "the first of three stages sends a part less, and a fourth rank has left, as it may",
        """
        pipe = dist.new_group([0, 1, 2])
        for turn in range(6 if rank < 3 else 0):
            for part in range(3):
                if rank:
                    dist.recv(torch.zeros(4), rank - 1)
                if rank < 2 and (rank, turn, part) != (0, 4, 2):
                    dist.send(torch.ones(4), rank + 1)
            dist.all_reduce(torch.ones(4), group=pipe)
        """,
        0,
        "unmatched_send_recv",
        nproc=4,
        since_2_13=True,
        says=("rank 3 has left. Rank 0 left the common way: rank 1 waits for exchange 3 of 3 with it",),
    ),
    case(
        "every rank looks for a store where nobody has one",
        """
        dist.TCPStore("127.0.0.1", 23457, 2, is_master=False, timeout=timedelta(seconds=4))
        """,
        "every rank",
        "wrong_address",
        init="",
        since_2_13=True,
        says=("Every rank looked for a store at 127.0.0.1:23457, where nobody has one at line",),
    ),
    hang(
        "every rank sends to its neighbours first, at two lines, and none receives",
        """
        if rank:
            dist.send(torch.ones(9000), rank - 1)
        if rank < 3:
            dist.send(torch.ones(9000), rank + 1)
        for n in (rank - 1, rank + 1):
            if 0 <= n < 4:
                dist.recv(torch.zeros(9000), n)
        """,
        "every rank",
        "everyone_waits",
        nproc=4,
        since_2_13=True,
        says=("Each does the same, and none meets another",),
    ),
    case(
        "guards abort the ranks that wait in vain for one that is stuck",
        """
        guard = threading.Timer(3, os.abort)
        guard.daemon = True
        if rank == 1:
            time.sleep(60)
        guard.start()
        dist.all_reduce(torch.ones(4))
        """,
        1,
        "straggler",
        nproc=3,
        init="import threading\n" + INIT,
        since_2_13=True,
        says=("Rank 1 had not come to all_reduce #4", "it sits at line 15: time.sleep(60)"),
    ),
    hang(
        "a rank leaves without the exit function by which it was to set its key of the store",
        """
        store = dist.distributed_c10d._get_default_store()
        def report():
            store.set(f"results/{rank}", "1")
            if rank == 0:
                store.wait([f"results/{n}" for n in range(4)], timedelta(hours=1))
        atexit.register(report)
        if rank == 1:
            os._exit(0)
        """,
        1,
        "store_key_never_set",
        nproc=4,
        init="import atexit\n" + INIT,
        since_2_13=True,
        says=('Rank 0 waits for the key "results/1" of the store', "rank 1 has not set it"),
    ),
    hang(
        "a stage that hands on two messages as one keeps the odd one at the end",
        """
        for n in (4, 4, 3):
            for turn in range(n):
                if rank == 0:
                    dist.send(torch.ones(2), 1)
                elif rank == 1:
                    dist.recv(torch.zeros(2), 0)
                    if turn % 2:
                        dist.send(torch.ones(4), 2)
                elif turn % 2 == 0:
                    dist.recv(torch.zeros(4), 1)
        dist.barrier()
        """,
        1,
        "unmatched_send_recv",
        nproc=3,
        since_2_13=True,
        says=(
            "rank 2 waits for one more of it, which has sent it one for every 2 messages from rank 0, and none for the last 1",
        ),
    ),
    hang(
        "a rank of a ring sends to another than the next",
        """
        right = 1 if rank == 3 else rank + 1
        for turn in range(4):
            if rank % 2 == 0:
                dist.send(torch.ones(2), right)
            dist.recv(torch.zeros(2), (rank - 1) % 4)
            if rank % 2:
                dist.send(torch.ones(2), right)
        dist.barrier()
        """,
        3,
        "unmatched_send_recv",
        nproc=4,
        since_2_13=True,
        says=("Rank 3 left the common way: it sends to rank 1, which never asks it for a message, and not to rank 0",),
    ),
    hang(
        "a rank of a ring receives of another than the one before",
        """
        left = 0 if rank == 2 else (rank - 1) % 4
        for turn in range(4):
            sending = dist.isend(torch.ones(2), (rank + 1) % 4)
            dist.recv(torch.zeros(2), left)
            sending.wait()
        dist.barrier()
        """,
        2,
        "unmatched_send_recv",
        nproc=4,
        since_2_13=True,
        says=("Rank 2 left the common way",),
    ),
    hang(
        "each rank opens, or looks for, a store at a port of its own",
        """
        port = int(os.environ["MASTER_PORT"]) % 10000 + 20000 + rank
        store = dist.TCPStore("127.0.0.1", port, 3, is_master=rank == 0, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        """,
        "every rank",
        "wrong_address",
        nproc=3,
        init="",
        says=("different stores at line 8", "No two of the ranks agree"),
    ),
    case(
        "a rank looks for the store that another has opened at another port",
        """
        port = int(os.environ["MASTER_PORT"]) % 10000 + 20000 + (rank == 2)
        store = dist.TCPStore("127.0.0.1", port, 3, is_master=rank == 0, timeout=timedelta(seconds=4))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        """,
        2,
        "wrong_address",
        nproc=3,
        init="",
        says=("Rank 2 differs from the others",),
    ),
    case(
        "a rank leaves before the sum that it began is over, and another has not come to it yet",
        """
        if rank == 0:
            time.sleep(60)
        begun = dist.all_reduce(torch.ones(3), async_op=True)
        if rank == 2:
            os._exit(0)
        begun.wait()
        """,
        2,
        "early_exit",
        nproc=3,
        since_2_13=True,
        says=("Rank 2 left early with exit code 0, before all_reduce #4",),
    ),
    hang(
        "a rank lets go of the handle of what it sends before the other comes to receive",
        """
        for turn in range(3):
            if rank == 0:
                dist.isend(torch.ones(9), 1)
            else:
                time.sleep(0.5)
                dist.recv(torch.zeros(9), 0)
            dist.all_reduce(torch.ones(2))
        """,
        0,
        "unmatched_send_recv",
        says=("it let go of the handle of isend with rank 1", "without a wait"),
    ),
    hang(
        "a callback that one rank alone has gathers at the end of an epoch",
        """
        class Pace:
            def on_epoch_end(self):
                print("epoch over", flush=True)
        class Board:
            def on_epoch_end(self):
                parts = [None] * 3
                dist.all_gather_object(parts, rank)
        callbacks = [Pace(), Board()] if rank == 1 else [Pace()]
        batches = torch.ones(4, 2)
        for epoch in range(3):
            for batch in batches:
                dist.all_reduce(batch)
            for callback in callbacks:
                callback.on_epoch_end()
        """,
        1,
        "collective_mismatch",
        nproc=3,
        says=("Rank 1 left the common way", "all_gather of [1] Long"),
    ),
    case(
        "a rank of a ring has nothing to send in one step, until the others give up",
        """
        for turn in range(5):
            sending = None if (rank, turn) == (2, 3) else dist.isend(torch.ones(2), (rank + 1) % 4)
            dist.recv(torch.zeros(2), (rank - 1) % 4)
            if sending is not None:
                sending.wait()
            dist.all_reduce(torch.ones(1))
        """,
        2,
        "unmatched_send_recv",
        init=IMPATIENT,
        nproc=4,
        since_2_13=True,
        says=("Rank 2 left the common way",),
    ),
    hang(
        "the second leader of a pair does not know that it is one",
        """
        pair = [dist.new_group(members) for members in ([0, 1], [2, 3])][rank // 2]
        leaders = dist.new_group([0, 2])
        for turn in range(3):
            mean = torch.ones(4)
            dist.reduce(mean, rank // 2 * 2, group=pair)
            if rank == 0:
                dist.all_reduce(mean, group=leaders)
            dist.broadcast(mean, rank // 2 * 2, group=pair)
        dist.barrier()
        """,
        2,
        "skipped_collective",
        nproc=4,
        says=("Rank 2 never joined all_reduce #1", "the rest of its group still waits"),
    ),
]
