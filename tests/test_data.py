"""`safe_loader`: the same batches whoever makes them, deaths of workers told and survived, uneven data seen at once."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import TORCH, wait_for
from torch.utils.data import Dataset, IterableDataset, RandomSampler

import ddpkit
from ddpkit import Run
from ddpkit.rank.loading.loader import SafeLoader, UnevenData, WorkerDied, WorkerTimedOut, safe_loader
from ddpkit.rank.loading.plan import default_context, default_workers
from ddpkit.rank.loading.workers import preload_torch

Script = Callable[..., str]
# A forked worker of an older torch imports for seconds before its first batch.
PATIENCE_S = 3 if TORCH >= (2, 6) else 15
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux's signals and /proc")


def augmented(i: int) -> torch.Tensor:
    """A sample with something of every random generator in it."""
    return torch.tensor([i, random.random(), np.random.rand(), torch.rand(())], dtype=torch.float64)


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 37

    def __getitem__(self, i: int) -> torch.Tensor:
        return augmented(i)


class ByTheList(Samples):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        assert type(indices) is list
        return [augmented(i) for i in reversed(indices)]


class Fails(Samples):
    """`what(i)` happens at sample 11, once for each file that `folder` can still be given: in a worker, or in the rank."""

    def __init__(self, what: Callable[[], Any], folder: Path, times: int = 1) -> None:
        self.what, self.folder, self.times = what, folder, times

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 11 and len(list(self.folder.glob("failed_*"))) < self.times:
            (self.folder / f"failed_{os.getpid()}").touch()
            self.what()
        return augmented(i)


class Killed:
    """Ends the process that calls it by a signal."""

    def __init__(self, signum: int) -> None:
        self.signum = signum

    def __call__(self) -> None:
        faulthandler.disable()
        os.kill(os.getpid(), self.signum)
        time.sleep(100)


def raised() -> None:
    raise KeyError("no such sample")


def stuck() -> None:
    time.sleep(100)


def mixed(samples: list[torch.Tensor]) -> torch.Tensor:
    """A collate function with random numbers of its own."""
    return torch.stack(samples) * random.random()


class Stream(IterableDataset[torch.Tensor]):
    """Samples without numbers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(())


def epochs(loader: SafeLoader, count: int = 2) -> list[list[torch.Tensor]]:
    return [list(loader) for _ in range(count)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def indices(batches: list[torch.Tensor]) -> list[int]:
    return [int(i) for batch in batches for i in batch[:, 0]]


def workers() -> list[psutil.Process]:
    """The living worker processes of this one: no forkserver, no keeper of semaphores, no zygote."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            line = " ".join(child.cmdline())
            others = ("resource_tracker", "forkserver", "zygote")
            if child.status() != psutil.STATUS_ZOMBIE and not any(word in line for word in others):
                found.append(child)
        except psutil.Error:
            continue
    return found


@pytest.fixture(autouse=True)
def no_worker_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    before = {p.pid for p in workers()}
    yield
    # A job is looked after by `home`, and has left the warm process.
    if "home" in request.fixturenames:
        return
    wait_for(lambda: {p.pid for p in workers()} <= before or gc.collect() < 0)


# The same batches.


@pytest.mark.parametrize("dataset", [Samples(), ByTheList()], ids=["item by item", "by the list"])
def test_a_batch_is_the_same_whoever_makes_it_and_wherever_the_pass_began(dataset: Any) -> None:
    first, second = epochs(safe_loader(dataset, 4, seed=3, num_workers=0, collate_fn=mixed))
    assert not same(first, second) and not same(first, epochs(safe_loader(dataset, 4, num_workers=0))[0])
    for count in (0, 1, 2):
        loader = safe_loader(dataset, 4, seed=3, num_workers=count, collate_fn=mixed, multiprocessing_context="fork")
        found = epochs(loader)
        assert same(found[0], first) and same(found[1], second) and loader.epoch == 2
        loader.load_state_dict({"epoch": 0, "batch": 3})
        assert same(list(loader), first[3:]) and same(list(loader), second)
        loader.close()


@pytest.mark.job
@pytest.mark.parametrize("way", ["forkserver", pytest.param("spawn", marks=pytest.mark.soak)])
def test_started_workers_make_the_same_batches_as_forked_ones(way: str) -> None:
    expected = epochs(safe_loader(Samples(), 5, num_workers=0))
    loader = safe_loader(Samples(), 5, num_workers=2, multiprocessing_context=way)
    found = epochs(loader)
    loader.close()
    assert same(found[0], expected[0]) and same(found[1], expected[1])


@pytest.mark.parametrize("count", [0, 2])
def test_the_random_numbers_of_the_rank_itself_stay_as_they_are(count: int) -> None:
    def drawn() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    undisturbed = [drawn() for _ in range(3)]
    random.setstate(states[0]), np.random.set_state(states[1]), torch.set_rng_state(states[2])
    batches = iter(safe_loader(Samples(), 8, num_workers=count))
    found = [drawn()]
    next(batches)
    found.append(drawn())
    list(batches)
    assert [*found, drawn()] == undisturbed


def test_also_where_a_sample_raises() -> None:
    loader = safe_loader(Raises(), 4, num_workers=0)
    before = random.getstate()
    with pytest.raises(KeyError, match="no such sample"):
        list(loader)
    assert random.getstate() == before


class Raises(Samples):
    def __getitem__(self, i: int) -> torch.Tensor:
        return augmented(i) if i != 11 else raised()


def test_the_state_tells_what_was_handed_out_and_not_what_was_loaded_ahead() -> None:
    loader = safe_loader(Samples(), 4, num_workers=2)
    assert loader.state_dict() == {"epoch": 0, "batch": 0} and len(loader) == 10
    seen = []
    last = torch.empty(0)
    for last in loader:  # noqa: B007
        seen.append(loader.state_dict())
        if len(seen) == 7:
            again = safe_loader(Samples(), 4, num_workers=0)
            again.load_state_dict(loader.state_dict())
        assert loader.epoch == 0
    assert seen == [{"epoch": 0, "batch": n} for n in range(1, 11)]
    assert loader.state_dict() == {"epoch": 1, "batch": 0}
    assert torch.equal(list(again)[-1], last) and again.epoch == 1
    again.load_state_dict(seen[-1])
    assert list(again) == [] and again.epoch == 1
    loader.close()


def test_a_pass_that_is_left_ends_its_epoch_and_its_workers() -> None:
    first, second = epochs(safe_loader(Samples(), 4, num_workers=0))
    loader = safe_loader(Samples(), 4, num_workers=2)
    for batch in loader:
        assert len(workers()) == 2
        if torch.equal(batch, first[2]):
            break
    assert workers() == [] and loader.state_dict() == {"epoch": 0, "batch": 3} and loader.epoch == 1
    state = loader.state_dict()
    assert same(list(loader), second)
    loader.load_state_dict(state)
    assert same(list(loader), first[3:])
    loader.epoch = 0
    assert same(list(loader), first) and len(workers()) == 2
    del loader
    assert workers() == []


def test_a_pass_ends_when_another_begins() -> None:
    loader = safe_loader(Samples(), 4, num_workers=1)
    one, two = iter(loader), iter(loader)
    next(one), next(two)
    assert loader.state_dict() == {"epoch": 1, "batch": 1}
    with pytest.raises(RuntimeError, match="SafeLoader: this pass ended when another began"):
        next(one)
    assert len(list(two)) == 9 and loader.epoch == 2
    loader.close()


@pytest.mark.parametrize("count", [0, 2])
def test_an_own_sampler_is_told_the_epoch_and_resumed(count: int) -> None:
    told: list[int] = []

    class Backwards:
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

        def __len__(self) -> int:
            return 10

        def __iter__(self) -> Iterator[int]:
            return iter(range(9, -1, -1))

    loader = safe_loader(Samples(), 4, sampler=Backwards(), num_workers=count, drop_last=True)
    assert [indices(epoch) for epoch in epochs(loader)] == [[9, 8, 7, 6, 5, 4, 3, 2]] * 2 and len(loader) == 2
    assert told == [0, 1]
    loader.close()
    loader = safe_loader(Samples(), 4, sampler=RandomSampler(Samples()), num_workers=count)
    first, second = epochs(loader)
    assert sorted(indices(first)) == list(range(37)) and indices(first) != indices(second)
    loader.load_state_dict({"epoch": 1, "batch": 4})
    assert same(list(loader), second[4:])
    loader.close()


# What is asked for.


@pytest.mark.parametrize(
    ("dataset", "options", "said"),
    [
        (Samples(), {"batch_size": 0}, "batch_size=0 asked for; it is the number of samples per batch and rank."),
        (
            Samples(),
            {"num_workers": -1},
            "num_workers=-1 asked for; use 0 to load in the rank itself, None for the default.",
        ),
        (Samples(), {"timeout_s": 0}, "timeout_s=0 asked for; give seconds, or None to wait for ever."),
        (Samples(), {"retries": -1}, "retries=-1 asked for; use 0 to fail at the first death of a worker."),
        (
            Samples(),
            {"multiprocessing_context": "thread"},
            'multiprocessing_context="thread" asked for; this system has ',
        ),
        (
            Samples(),
            {"sampler": [1], "shuffle": True},
            "shuffle=True and a sampler= asked for; the sampler has the order",
        ),
        (
            Samples(),
            {"sampler": [1], "even": False},
            "even=False gives rank r the samples r, r + world size, ... in that order",
        ),
        (Samples(), {"shuffle": True, "even": False}, "even=False gives rank r the samples r, r + world size, ..."),
        (Stream(), {}, "an IterableDataset given; its samples have no numbers by which ranks could share them."),
        (
            Samples(),
            {"batch_size": 38, "drop_last": True},
            "37 samples on 1 ranks in batches of 38 (drop_last=True) make no",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(dataset: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refused:
        safe_loader(dataset, **{"batch_size": 4, **options})
    assert str(refused.value).startswith(f"safe_loader: {said}")


def test_a_place_that_does_not_exist_is_refused() -> None:
    loader = safe_loader(Samples(), 4, num_workers=0)
    for state in ({"epoch": 1}, {"epoch": 0, "batch": -1}):
        with pytest.raises(ValueError, match="is no loader's state; it has the numbers epoch and batch"):
            loader.load_state_dict(state)
    loader.load_state_dict({"epoch": 2, "batch": 11})
    with pytest.raises(ValueError, match="to go on at batch 11 of epoch 2 was asked for, which has 10: the data, "):
        list(loader)


@on_linux
def test_the_default_number_of_workers_leaves_a_core_to_each_rank() -> None:
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert (default_workers(1), default_workers(4)) == (0, 0)
    finally:
        os.sched_setaffinity(0, cores)
    assert default_workers(1) == min(8, len(cores) - 1) == safe_loader(Samples(), 4).num_workers


@on_linux
def test_with_a_gpu_workers_are_not_forked_from_the_rank_itself() -> None:
    assert (default_context(on_gpu=True), default_context(on_gpu=False)) == ("forkserver", "fork")


# Deaths.


@on_linux
@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            Killed(signal.SIGKILL),
            "SIGKILL: as a rule the kernel, for want of memory, but nothing that can be read here says so",
        ),
        (
            Killed(signal.SIGBUS),
            "SIGBUS: a mapped page had nothing behind it: /dev/shm ({shm} MiB, ",
        ),
        (
            Killed(signal.SIGSEGV),
            "SIGSEGV: native code in the dataset, a decoder for instance, touched memory that is not",
        ),
        (
            Killed(signal.SIGABRT),
            "SIGABRT: native code in the dataset, a decoder for instance, gave up; its last words are",
        ),
        (Killed(signal.SIGTERM), "SIGTERM: somebody ended it"),
        (Killed(signal.SIGUSR1), "SIGUSR1: see `man 7 signal`"),
        (Killed(40), "SIGRTMIN+6: see `man 7 signal`"),
        (
            lambda: os._exit(3),
            "Exit code 3: the dataset, or a library of it, left the process; a traceback may be on stderr",
        ),
        (lambda: os._exit(0), "Exit code 0: the dataset, or a library of it, left the process"),
    ],
    ids="kill bus segv abrt term usr1 nameless exit_3 exit_0".split(),
)
def test_a_workers_death_is_told_with_its_likely_cause(what: Any, said: str, tmp_path: Path) -> None:
    loader = safe_loader(Fails(what, tmp_path), 4, shuffle=False, num_workers=2, multiprocessing_context="fork")
    since = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        list(loader)
    assert time.monotonic() - since < 10 and workers() == []
    died = caught.value
    shm = os.statvfs("/dev/shm")
    pid = int(next(tmp_path.glob("failed_*")).name.partition("_")[2])
    how = f"is killed by signal: {signal.strsignal(what.signum)}" if isinstance(what, Killed) else "exited unexpectedly"
    begin = f"rank 0: DataLoader worker (pid {pid}) {how}. It was worker 0 of 2, and had yet to deliver "
    begin += f"batch {died.batch} of epoch 0. "
    assert str(died).startswith(begin + said.format(shm=round(shm.f_blocks * shm.f_frsize / 2**20)))
    assert "num_workers=0 shows the fault in the rank itself" in str(died)
    assert (died.rank, died.worker, died.pid, died.epoch) == (0, 0, pid, 0) and died.batch in (0, 2)
    assert died.signal == (said.partition(":")[0] if isinstance(what, Killed) else "")
    assert f"{pid}) exited unexpectedly" in str(died.__cause__) or isinstance(died.__cause__, OSError | EOFError)
    assert loader.state_dict()["batch"] <= 2


@on_linux
def test_the_kernels_kill_for_want_of_memory_is_told(tmp_path: Path) -> None:
    group = Path("/sys/fs/cgroup/memory/ddpkit-test-data")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("100M")
    except OSError as error:
        pytest.skip(f"no cgroup of version 1 can be made here: {error}")

    def hoard() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        hoarded = []
        while True:
            hoarded.append(torch.ones(1 << 22))

    try:
        with pytest.raises(WorkerDied) as caught:
            list(safe_loader(Fails(hoard, tmp_path), 4, num_workers=1, multiprocessing_context="fork"))
    finally:
        group.rmdir()
    assert "SIGKILL: the kernel killed it for want of memory (the kernel's log says: " in str(caught.value)


@pytest.mark.job
def test_a_worker_that_sends_nothing_is_told(tmp_path: Path) -> None:
    loader = safe_loader(Fails(stuck, tmp_path), 4, shuffle=False, num_workers=2, timeout_s=PATIENCE_S)
    since = time.monotonic()
    with pytest.raises(WorkerTimedOut) as caught:
        list(loader)
    assert PATIENCE_S <= time.monotonic() - since < PATIENCE_S + 6 and workers() == []
    begin = f"rank 0: DataLoader timed out after {PATIENCE_S} seconds: worker 0 of 2 (pid "
    assert str(caught.value).startswith(begin)
    assert ") did not send batch 2 of epoch 0. If that batch is merely slow, give safe_loader a larger" in str(
        caught.value
    )
    assert (caught.value.worker, caught.value.batch) == (0, 2)


@pytest.mark.parametrize("count", [0, 2])
def test_a_workers_exception_is_passed_on_as_it_is(count: int) -> None:
    with pytest.raises(KeyError, match="no such sample") as caught:
        list(safe_loader(Raises(), 4, num_workers=count, retries=3))
    assert workers() == [] and caught.value.__cause__ is None


@pytest.mark.job
@pytest.mark.parametrize("ending", ["sys.exit(0)", "raise ValueError", "os.kill(os.getpid(), 9)"])
def test_workers_go_with_their_rank(ending: str) -> None:
    code = f"""
import os, sys, torch, psutil
from ddpkit.rank.loading.loader import safe_loader
loader = safe_loader([0.0] * 100, 4, num_workers=2)
for batch in loader:
    print(*(child.pid for child in psutil.Process().children()), flush=True)
    {ending}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids), 15)


@on_linux
@pytest.mark.job
def test_workers_go_with_a_rank_that_is_killed_before_torch_watches_it() -> None:
    code = """
import os, time
from torch.utils.data._utils import worker
from ddpkit.rank.loading.loader import safe_loader
rank, watch = os.getpid(), worker.ManagerWatchdog
def watch_late():
    while os.getppid() == rank:
        time.sleep(0.01)
    return watch()
worker.ManagerWatchdog = watch_late
loader = safe_loader([0.0] * 100, 4, num_workers=2)
print(*(worker.pid for worker in loader._started()._workers), flush=True)
os.kill(rank, 9)
"""
    # A worker that stays holds the pipe, and this would time out.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert len(done.stdout.split()) == 2, done.stderr


# Retries.


@on_linux
@pytest.mark.parametrize("way", ["fork", pytest.param("forkserver", marks=pytest.mark.job)])
def test_the_loader_goes_on_with_half_the_workers_at_the_missing_batch(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = epochs(safe_loader(Samples(), 4, num_workers=0))
    fails = Fails(Killed(signal.SIGKILL), tmp_path, times=2)
    loader = safe_loader(fails, 4, num_workers=2, retries=2, multiprocessing_context=way)
    with caplog.at_level(logging.WARNING, "ddpkit.rank"):
        found = epochs(loader)
    assert same(found[0], expected[0]) and same(found[1], expected[1])
    assert loader.num_workers == 0 and workers() == []
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "rank 0: worker " in told[0] and " of 2 (pid " in told[0]
    assert ") died of SIGKILL before it delivered batch " in told[0] and " of epoch 0; the loader goes on at" in told[0]
    assert told[0].endswith("with num_workers=1. Retries left in this epoch, on all ranks: 1.")
    assert told[1].endswith("with num_workers=0. Retries left in this epoch, on all ranks: 0.")


@pytest.mark.job
def test_a_stuck_worker_is_replaced_too(tmp_path: Path) -> None:
    loader = safe_loader(Fails(stuck, tmp_path), 4, num_workers=2, retries=1, timeout_s=PATIENCE_S)
    assert same(list(loader), list(safe_loader(Samples(), 4, num_workers=0))) and loader.num_workers == 1
    loader.close()


@on_linux
def test_retries_are_bounded_in_each_epoch(tmp_path: Path) -> None:
    loader = safe_loader(Fails(Killed(signal.SIGKILL), tmp_path, times=2), 4, num_workers=2, retries=1)
    with pytest.raises(WorkerDied):
        list(loader)
    assert loader.num_workers == 1 and workers() == []
    state = loader.state_dict()
    rest = list(safe_loader(Samples(), 4, num_workers=0))[state["batch"] :]
    loader.load_state_dict(state)
    assert same(list(loader), rest)
    loader.close()


@on_linux
@pytest.mark.parametrize("retries", [0, 1])
def test_a_worker_that_dies_between_two_epochs_is_missed_in_the_next(retries: int) -> None:
    expected = epochs(safe_loader(Samples(), 4, num_workers=0))
    loader = safe_loader(Samples(), 4, num_workers=2, retries=retries)
    list(loader)
    workers()[1].kill()
    if retries:
        assert same(list(loader), expected[1]) and loader.num_workers == 1
        loader.close()
    else:
        with pytest.raises(
            WorkerDied,
            match=r"killed by signal: Killed. It was worker . of 2, and had yet to deliver batch 0 of epoch 1\.",
        ):
            list(loader)


@on_linux
def test_a_forkserver_imports_torch_once_unless_the_program_has_said_what_it_imports() -> None:
    before = forkserver._forkserver._preload_modules
    try:
        for named, expected in ((["__main__"], ["__main__", "ddpkit.rank.loading.batches"]), (["json"], ["json"])):
            multiprocessing.set_forkserver_preload(named)
            preload_torch()
            assert forkserver._forkserver._preload_modules == expected
    finally:
        multiprocessing.set_forkserver_preload(before)


@pytest.mark.soak
@on_linux
def test_a_kill_at_any_moment_changes_no_batch() -> None:
    class Slow(Samples):
        def __getitem__(self, i: int) -> torch.Tensor:
            time.sleep(0.002)
            return augmented(i)

    expected = list(safe_loader(Slow(), 2, num_workers=0))
    chance = random.Random(0)

    def kill_one() -> None:
        with contextlib.suppress(IndexError, psutil.NoSuchProcess):
            chance.choice(workers()).kill()

    for _ in range(100):
        loader = safe_loader(Slow(), 2, num_workers=2, retries=5, timeout_s=60)
        timer = threading.Timer(chance.uniform(0, 0.15), kill_one)
        timer.start()
        found = list(loader)
        timer.join()
        loader.close()
        assert same(found, expected)


# Jobs of two ranks.

JOB = """
import os, random, signal, sys, time
import torch, torch.distributed as dist
from torch.utils.data import Dataset, SequentialSampler
from ddpkit.rank import report, setup
from ddpkit.rank.loading.loader import UnevenData, WorkerDied, safe_loader

how = sys.argv[1] if len(sys.argv) > 1 else ""

class Samples(Dataset):
    def __len__(self):
        return 37
    def __getitem__(self, i):
        return torch.tensor([i, random.random()], dtype=torch.float64)

class Fails(Samples):
    # Once on each rank of `ranks`, in a worker.
    def __init__(self, ranks):
        self.flag = f"failed_{rank}" if rank in ranks else None
    def __getitem__(self, i):
        if self.flag and i in (10, 11) and not os.path.exists(self.flag):
            open(self.flag, "w").close()
            if how == "stuck":
                time.sleep(100)
            os.kill(os.getpid(), getattr(signal, how))
        return super().__getitem__(i)

rank = int(os.environ["RANK"])
"""


def launch(path: str, **options: Any) -> Run:
    return ddpkit.launch(path, show=False, **{"timeout": 120, "backend": "gloo", **options})


@pytest.mark.job
@on_linux
@pytest.mark.parametrize(
    ("how", "name", "said"),
    [
        ("SIGKILL", "loader_worker_killed", "rank 1: DataLoader worker (pid "),
        ("SIGBUS", "bus_error", "is killed by signal: Bus error. It was worker "),
        ("stuck", "loader_timeout", f"rank 1: DataLoader timed out after {PATIENCE_S} seconds: worker "),
    ],
)
def test_the_job_of_a_dead_worker_is_diagnosed_by_it(script: Script, how: str, name: str, said: str) -> None:
    body = """
with setup() as here:
    for batch in safe_loader(Fails([1]), 4, here=here, shuffle=False, num_workers=2, timeout_s=PATIENCE_S):
        dist.all_reduce(batch.sum())
"""
    run = launch(script(JOB + f"PATIENCE_S = {PATIENCE_S}" + body), args=[how])
    assert run.culprit == 1 and run.diagnosis is not None and run.diagnosis.name == name, f"{run}\n{run.diagnosis}"
    assert run.diagnosis.rank == 1 and run.diagnosis.confidence == "certain"
    assert run.ranks[1].failure is not None and said in run.ranks[1].failure.message


@pytest.mark.job
@on_linux
def test_all_ranks_count_the_retries_together_and_go_on_alike(script: Script) -> None:
    body = """
with setup() as here:
    options = dict(seed=5, num_workers=0)
    plain = safe_loader(Samples(), 4, here=here, **options)
    expected = [list(plain) for _ in range(2)]
    loader = safe_loader(Fails([1]), 4, here=here, seed=5, num_workers=2, retries=1)
    found, workers = [], []
    for epoch in range(2):
        found.append([])
        for batch in loader:
            found[-1].append(batch)
            dist.all_reduce(batch.sum())
        workers.append(loader.num_workers)
    loader.close()
    same = [torch.equal(x, y) for a, b in zip(expected, found) for x, y in zip(a, b, strict=True)]
    report(same=all(same), batches=len(same), workers=workers)

    # One retry in all, and a death on each rank: without a collective, one of them is refused.
    dist.barrier()
    if os.path.exists(f"failed_{rank}"):
        os.remove(f"failed_{rank}")
    unlucky = safe_loader(Fails([0, 1]), 4, here=here, seed=5, num_workers=2, retries=1)
    try:
        list(unlucky)
        report(died=False)
    except WorkerDied as error:
        report(died=True)
    unlucky.close()
    dist.barrier()
"""
    run = launch(script(JOB + body), args=["SIGKILL"])
    assert run.ok, f"{run}\n{[r.stderr[-2000:] for r in run.ranks]}"
    zero, one = run.reported[0], run.reported[1]
    assert zero["same"] and one["same"] and zero["batches"] == one["batches"] == 10
    assert (zero["workers"], one["workers"]) == ([2, 1], [1, 1])
    assert sorted([zero["died"], one["died"]]) == [False, True]
    assert (
        "rank 1: worker " in run.ranks[1].stderr
        and "Retries left in this epoch, on all ranks: 0." in run.ranks[1].stderr
    )


@pytest.mark.job
def test_uneven_data_are_seen_before_the_first_step_on_every_rank(script: Script) -> None:
    body = """
def refused(loader):
    try:
        next(iter(loader))
    except UnevenData as error:
        return str(error)

with setup() as here:
    evaluation = safe_loader(Samples(), 4, even=False)
    report(batches=len(safe_loader(Samples(), 4, here=here)))
    report(evaluated=[int(i) for batch in evaluation for i in batch[:, 0]] if rank else [*range(0, 37, 2)])
    report(seed=refused(safe_loader(Samples(), 4, here=here, seed=rank)))
    resumed = safe_loader(Samples(), 4, here=here)
    resumed.load_state_dict({"epoch": 2, "batch": 3 * rank})
    report(place=refused(resumed))
    both = safe_loader(Samples(), 4, here=here, shuffle=False)
    report(trained=[int(i) for batch in both for i in batch[:, 0]])
    for batch in safe_loader(Samples(), 4, here=here, sampler=range(40 - rank * 4)):
        print("a step")
"""
    run = launch(script(JOB + body))
    assert run.state == "failed" and run.culprit == "every rank", str(run)
    for rank, told in run.reported.items():
        assert told["seed"] == (
            "safe_loader: rank 0 has the seed 0, rank 1 has the seed 1: samples would come twice, or not at all. "
            "Give every rank the same seed=."
        )
        assert told["place"] == (
            "safe_loader: rank 0 has batch 0 of epoch 2 to come, rank 1 has batch 3 of epoch 2 to come: "
            "load the same state, or set the same epoch, on every rank."
        )
        failure = run.ranks[rank].failure
        assert failure is not None and failure.type == UnevenData.__name__ and "a step" not in run.ranks[rank].stdout
        assert failure.message == (
            "safe_loader: rank 0 has 10 batches, rank 1 has 9 batches: those with more would wait for ever. "
            "Use DistributedSampler (as without sampler=), drop_last=True, or torch's Join."
        )
    assert run.reported[0]["trained"] == [*range(0, 37, 2)] and run.reported[1]["trained"] == [*range(1, 37, 2), 0]
    assert run.reported[1]["evaluated"] == [*range(1, 37, 2)]
    assert run.reported[0]["batches"] == run.reported[1]["batches"] == 5
