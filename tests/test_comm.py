"""The communication profiler: to the bit the same training, true counts, the rank that holds up the others, the table."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from conftest import RECORDS

import ddpkit
from ddpkit import Run
from ddpkit.rank.comm import profiler, stats
from ddpkit.rank.comm.buckets import HostClock, Pass

Script = Callable[..., str]
MS = 10**6
NOT_RECORDED = "This torch records no collectives of this backend; trace=True counts them."
UNCOUNTED = "" if RECORDS else NOT_RECORDED
AND_UNCOUNTED = "" if RECORDS else f" {NOT_RECORDED}"


def launch(path: str, **options: Any) -> Run:
    run = ddpkit.launch(path, show=False, **{"timeout": 200, "backend": "gloo", **options})
    assert run.ok, f"{run}\n{[r.stderr[-3000:] for r in run.ranks]}"
    return run


# Each way of training is done twice from the same start, plain, and with profilers entered and left on the way.
SAME = """
import contextlib, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from ddpkit.rank import report, setup
from ddpkit.rank.comm.profiler import CommProfiler

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
    def forward(self, x, step):
        return {"y": [self.one(x) if step % 2 else self.two(x)]}

class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(50, 64, sparse=True), nn.Linear(64, 64)
    def forward(self, x, step):
        return self.out(self.words((x[:, :5].abs() * 10).long() % 50).sum(1))

class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), *(nn.Linear(64, 64) for _ in range(4)))
    def forward(self, x, step):
        return self.net(x)

WAYS = {
    "plain": (Dense, {}, {}),
    "one bucket": (Dense, {"bucket_cap_mb": 25}, {}),
    "view": (Dense, {"gradient_as_bucket_view": True}, {}),
    "view, zeroed": (Dense, {"gradient_as_bucket_view": True}, {"to_none": False}),
    "static": (Dense, {"static_graph": True}, {}),
    "unused": (Branches, {"find_unused_parameters": True}, {}),
    "accumulated": (Dense, {}, {"window": 3}),
    "accumulated view": (Dense, {"gradient_as_bucket_view": True}, {"window": 3}),
    "sparse": (Sparse, {}, {}),
    "bf16": (Dense, {}, {"dtype": torch.bfloat16}),
}

def train(here, kind, options, profiled, window=1, to_none=True, dtype=torch.float32):
    torch.manual_seed(1)
    net = DDP(kind().to(dtype), **{"bucket_cap_mb": 0.03, **options})
    last = list(net.module.state_dict())[-1]
    before = net.module.state_dict()[last].clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    around = contextlib.ExitStack()
    torch.manual_seed(here.rank)
    found = []
    for step in range(12):
        # In the middle of a training loop, one that ends, and one that follows it.
        if profiled and step in (2, 8):
            found.append(around.enter_context(CommProfiler(net)))
        if step == 6:
            around.close()
        for micro in range(window):
            with net.no_sync() if micro < window - 1 else contextlib.nullcontext():
                y = net(torch.randn(8, 64, dtype=dtype), step)
                (y["y"][0] if isinstance(y, dict) else y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    around.close()
    assert not torch.equal(before, net.module.state_dict()[last])
    return [p.detach().clone() for p in net.parameters()], [profiler.stats() for profiler in found]

with setup() as here:
    ways = {name: WAYS[name] for name in sys.argv[1:]} or WAYS
    for name, (kind, options, how) in ways.items():
        plain, _ = train(here, kind, options, False, **how)
        watched, found = train(here, kind, options, True, **how)
        parameters = sum(p.nbytes for p in watched)
        same = all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
        report(**{name: [same, parameters, found]})
"""


@pytest.mark.job
def test_parameters_are_equal_to_the_bit_with_and_without_it(script: Script) -> None:
    run = launch(script(SAME))
    for reported in run.reported.values():
        assert len(reported) == 10
        for way, (same, parameters, found) in reported.items():
            assert same, way
            first, second = found
            assert (first["passes"], second["passes"]) == (4, 4), way
            if way != "sparse":
                assert first["bytes"] == second["bytes"] == 4 * parameters, way
                assert sum(bucket["bytes"] for bucket in second["buckets"]) == parameters, way
            assert first["note"] == UNCOUNTED and first["world_size"] == 2 and first["backend"] == "gloo"
            assert [each["rank"] for each in first["ranks"]] == [0, 1]
            assert 0 <= first["hidden_share"] < 1 and first["exposed_ms"] <= first["comm_ms"]
        assert len(reported["one bucket"][2][0]["buckets"]) == 1 and reported["one bucket"][2][0]["hidden_share"] == 0
        assert len(reported["plain"][2][0]["buckets"]) > 2 and reported["plain"][2][0]["sync_ms"] > 0
        assert reported["unused"][2][0]["sync_ms"] == 0


@pytest.mark.job
def test_three_ranks_divide_as_ddp_does_or_it_says_that_it_cannot(script: Script) -> None:
    """A third is no binary fraction: to multiply by it and to divide by three are not the same."""
    run = launch(script(SAME), nproc=3, args=["plain", "accumulated", "sparse", "view"])
    for reported in run.reported.values():
        assert all(reported[way][0] for way in ("plain", "accumulated", "sparse", "view"))
        assert reported["plain"][2][0]["passes"] == 4 and reported["view"][2][0]["passes"] == 0
        assert reported["view"][2][0]["note"] == (
            "With gradients in the buckets DDP multiplies some by 1/3 and divides others by 3, which a hook cannot tell apart: "
            "the buckets are not timed." + AND_UNCOUNTED
        )


WHO = """
import time
import torch, torch.distributed as dist
import torch._dynamo
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from ddpkit.rank import report, setup
from ddpkit.rank.comm import profiler as comm
from ddpkit.rank.comm.profiler import CommProfiler

class Late(nn.Module):
    s = 0.0
    def forward(self, x):
        time.sleep(self.s)
        return x

def model():
    return DDP(nn.Sequential(Late(), *(nn.Linear(256, 256) for _ in range(4))), bucket_cap_mb=0.5)

def step(net):
    net(torch.ones(8, 256)).square().mean().backward()

def said(call):
    try:
        call()
    except (RuntimeError, TypeError) as error:
        return str(error)

def stats(net, steps=12, late=lambda step: False, trace=False):
    with CommProfiler(net, trace=trace) as profiler:
        for i in range(steps):
            net.module[0].s = 0.1 if late(i) else 0.02
            step(net)
            if i % 4 == 0:
                dist.all_reduce(torch.ones(3, dtype=torch.float64))
        running = profiler.stats()
    assert running["ranks"] == [] and running["passes"] == steps
    return profiler

with setup() as here:
    net = model()
    report(healthy=stats(net).stats())
    slow = stats(net, late=lambda step: here.rank == 1)
    if here.rank == 0:
        # No rank is asked for anything here.
        report(table=slow.table(), same=slow.to_dict() == slow.stats())
    as_it_was = slow.stats()
    report(slow=as_it_was)
    report(takes_turns=stats(net, late=lambda step: step % 2 == here.rank).stats())
    report(traced=stats(net, trace=True).stats())

    with CommProfiler(net) as outer:
        report(twice=said(CommProfiler(net).__enter__), plain=said(lambda: CommProfiler(net.module)))
        try:
            with CommProfiler(model()) as broken:
                raise KeyError("no exchange then")
        except KeyError:
            report(broken=broken.stats()["ranks"])
    nothing = CommProfiler(net, enabled=False)
    with nothing:
        step(net)
    report(nothing=nothing.stats(), nothing_table=nothing.table())

    hooked = model()
    hooked.register_comm_hook(None, allreduce_hook)
    with CommProfiler(hooked) as profiler:
        for _ in range(3):
            step(hooked)
    report(hooked=profiler.stats(), hooked_table=profiler.table())

    with torch.profiler.profile() as outer, CommProfiler(net, trace=True) as profiler:
        step(net)
    report(traced_twice=profiler.stats(), outer=len(outer.events()))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        with CommProfiler(model()) as profiler:
            pass
    report(compiled=profiler.stats()["note"])

    alone = model()
    if here.rank == 0:
        comm.OTHERS_WITHIN_S = 0.2
        with CommProfiler(alone) as profiler:
            step(alone)
        report(alone=profiler.stats())
    else:
        step(alone)

    with Join([net]):
        for _ in range(3 - here.rank):
            step(net)
    def join():
        with Join([net], divide_by_initial_world_size=False):
            step(net)
    report(join=said(join))
# The process group is gone, and what was found stays.
report(afterwards=slow.stats() == as_it_was)
"""


@pytest.mark.job
def test_who_holds_up_the_others_is_named_and_nobody_in_a_healthy_job(script: Script) -> None:
    run = launch(script(WHO))
    zero, one = run.reported[0], run.reported[1]
    for reported in (zero, one):
        slow, traced = reported["slow"], reported["traced"]
        assert slow["straggler"] == 1 and reported["healthy"]["straggler"] is None
        assert reported["takes_turns"]["straggler"] is None
        waits = [each["waited_ms"] for each in slow["ranks"]]
        assert 50 < waits[0] < 400 and waits[1] < 40 and slow["ranks"][1]["last_share"] > 0.9
        assert slow["ranks"] == zero["slow"]["ranks"]
        assert 90 < slow["step_ms"] < 1500
        check_collectives(slow, slow, timed=False)
        check_collectives(traced, slow, timed=True)
    # The one that waits is rank 0: its buckets come back late, after backward.
    assert zero["slow"]["exposed_ms"] > 50 > one["slow"]["exposed_ms"]
    assert "Rank 1 comes last in" in zero["table"] and "bucket" in zero["table"] and zero["same"] is True
    check_refusals(zero, one)


def check_collectives(stats: dict[str, Any], like: dict[str, Any], timed: bool) -> None:
    """The profiler's own figures and torch's records agree."""
    if not RECORDS and not timed:
        assert stats["collectives"] is None and UNCOUNTED in stats["note"]
        return
    (found,) = (each for each in stats["collectives"] if each["name"] == "gloo:all_reduce")
    assert found["count"] == 12 * len(like["buckets"]) + 3
    assert found["bytes"] == (stats["bytes"] + 3 * 3 * 8 if RECORDS else None)
    assert found["ms"] > 12 if timed else found["ms"] is None


def check_refusals(zero: dict[str, Any], one: dict[str, Any]) -> None:
    """What it cannot do it says in one sentence."""
    assert zero["twice"] == "CommProfiler: this model is being profiled already; leave the other CommProfiler first."
    assert zero["plain"] == (
        "CommProfiler: a model wrapped in DistributedDataParallel asked for, but this is a Sequential; "
        "hand over what DistributedDataParallel(model) returned."
    )
    assert zero["broken"] == [] and zero["nothing"]["passes"] == 0 and zero["nothing"]["buckets"] == []
    assert "0 backward passes" in zero["nothing_table"]
    assert zero["hooked"]["note"].startswith("The model has a comm hook already (allreduce_hook), and DDP takes one:")
    assert zero["hooked"]["buckets"] == []
    assert "comm hook already" in zero["hooked_table"]
    assert zero["traced_twice"]["note"] == (
        "torch's profiler runs already, so that this one could not trace the collectives." + AND_UNCOUNTED
    )
    assert zero["traced_twice"]["passes"] == 1 and zero["outer"] > 10
    assert zero["compiled"] == (
        "The model reduces gradient by gradient, with DDP's reducer for compiled models: there are no buckets to time."
        + AND_UNCOUNTED
    )
    unknown = "Which rank waits for which is not known: not every rank left its CommProfiler within 0.2 s."
    assert zero["alone"]["note"].replace(AND_UNCOUNTED.strip(), "").strip() == unknown
    assert zero["alone"]["passes"] == 1 and zero["alone"]["ranks"] == []
    assert zero["afterwards"] is True
    assert zero["join"] == one["join"] and "divide_by_initial_world_size=False) was asked of a model" in zero["join"]


# What the moments say: passes made up in ns of the host's clock.


def passing(begin: int, *buckets: tuple[int, int], size: int = 1000, sync: int = 0) -> Pass:
    """A pass whose backward begins at `begin` ms, with buckets from and to so many ms after that."""
    made = Pass(syncs=[(0, sync * MS)], backward=begin * MS)
    for ready, back in buckets:
        made.ready.append((begin + ready) * MS)
        made.back.append((begin + back) * MS)
        made.sizes.append(size)
    return made


def stats_of(
    passes: list[Pass], waited: dict[int, list[tuple[float, float]]] | None = None, **more: Any
) -> dict[str, Any]:
    found = stats.timed(passes, HostClock())
    base = {"rank": 0, "world_size": 2, "backend": "gloo", "device": "cpu", "passes": len(passes), "note": ""}
    totals = {"bytes": sum(sum(p.sizes) for p in passes), "collectives": None}
    return {**base, **totals, **found, **stats.by_rank(waited or {}, found["step_ms"]), **more}


def test_time_under_way_is_counted_once_and_what_follows_backward_is_exposed() -> None:
    found = stats_of([passing(at, (2, 6), (5, 9), (10, 14), sync=3) for at in (0, 40, 80)])
    # From 2 to 9 and from 10 to 14; the last is ready as backward ends.
    assert (found["backward_ms"], found["comm_ms"], found["exposed_ms"], found["step_ms"]) == (10, 11, 4, 40)
    assert found["hidden_share"] == pytest.approx(7 / 11, abs=1e-4) and found["sync_ms"] == 3
    assert found["buckets"][1] == {"bucket": 1, "bytes": 1000, "ready_ms": 5, "back_ms": 9, "ms": 4}


def test_passes_with_other_buckets_and_those_that_broke_off_do_not_count() -> None:
    broken = passing(200, (1, 2))
    broken.back[0] = None
    laid_out_anew = [passing(0, (1, 90), size=10), *(passing(at, (1, 3)) for at in (100, 120, 140)), broken]
    found = stats_of(laid_out_anew)
    assert [each["ms"] for each in found["buckets"]] == [2] and found["bytes"] == 10 + 4 * 1000
    assert stats_of([broken])["buckets"] == [] and stats_of([])["step_ms"] == 0


@pytest.mark.parametrize(
    ("late", "straggler"),
    [
        ([1] * 20, 1),
        ([0, 1] * 10, None),
        ([1] * 12 + [0] * 8, None),
        ([1] * 4, None),
    ],
)
def test_a_straggler_is_who_comes_last_as_a_rule(late: list[int], straggler: int | None) -> None:
    waited = {rank: [(0.0, 2.0 if rank == last else 12.0) for last in late] for rank in range(3)}
    assert stats.by_rank(waited, step_ms=40.0)["straggler"] == straggler
    # Where nobody loses much, nobody is called that.
    assert stats.by_rank(waited, step_ms=100.0)["straggler"] is None


def test_waits_for_buffers_count_and_a_rank_that_saw_fewer_passes_is_lined_up_by_the_last() -> None:
    waited = {0: [(0.0, 2.0)] * 10, 1: [(9.0, 2.0)] * 12}
    found = stats.by_rank(waited, step_ms=20.0)
    assert found["straggler"] == 0 and found["ranks"][1] == {"rank": 1, "waited_ms": 9.0, "last_share": 0.0}
    unfinished = {0: [(float("nan"), float("nan"))], 1: [(1.0, 1.0)]}
    assert stats.by_rank(unfinished, 1.0) == {"ranks": [], "straggler": None}


SLOW = {rank: [(0.0, 2.0 + 30.0 * (rank == 0))] * 10 for rank in range(2)}


def test_the_table_says_all_of_it() -> None:
    rows = [{"name": "gloo:all_reduce", "count": 3, "bytes": None, "ms": 4.5}]
    found = stats_of(
        [passing(at, (2, 6), (10, 14)) for at in range(0, 400, 40)], SLOW, collectives=rows, note="A note."
    )
    assert stats.table(found) == (
        "rank 0 of 2, gloo on cpu: 10 backward passes with gradients of 0.00 MiB, 40.0 ms a step\n"
        "backward 10.0 ms; all-reduce 8.0 ms, 50% of it hidden behind backward, 4.0 ms after it; waits for buffers 0.0 ms\n"
        "\n"
        "bucket   MiB  ready at ms  back at ms  took ms\n"
        "0       0.00          2.0         6.0      4.0\n"
        "1       0.00         10.0        14.0      4.0\n"
        "\n"
        "collective       count  MiB   ms\n"
        "gloo:all_reduce      3    -  4.5\n"
        "\n"
        "rank  waits ms  comes last in\n"
        "0         30.0             0%\n"
        "1          0.0           100%\n"
        "Rank 1 comes last in 100% of the steps, and the others wait up to 30.0 ms for it, 75% of a step.\n"
        "\n"
        "A note."
    )


def test_where_torch_has_forgotten_collectives_or_keeps_none_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(number: int) -> dict[str, Any]:
        return {
            "profiling_name": "gloo:broadcast",
            "record_id": number,
            "input_sizes": [[2, 3]],
            "input_dtypes": ["Long"],
        }

    kept = [entry(number) for number in range(7, 10)]
    monkeypatch.setattr(profiler, "_recorded", lambda since_ns: (kept, 3))
    rows = [{"name": "gloo:broadcast", "count": 3, "bytes": 3 * 48, "ms": None}]
    assert profiler._collectives(0, None) == (rows, "Of the collectives only the last 3 are counted.")
    monkeypatch.setattr(profiler, "_recorded", lambda since_ns: (kept, 8))
    assert profiler._collectives(0, None) == (rows, "")
    monkeypatch.setattr(profiler, "_recorded", lambda since_ns: ([], 0))
    assert profiler._collectives(0, None) == (None, NOT_RECORDED)


@pytest.mark.job
def test_on_a_gpu_the_streams_tell_the_time(script: Script) -> None:
    path = script(
        """
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel as DDP
        from ddpkit.rank import report, setup
        from ddpkit.rank.comm.profiler import CommProfiler

        with setup() as here:
            net = DDP(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).to(here.device), bucket_cap_mb=40)
            with CommProfiler(net, trace=True) as profiler:
                for _ in range(20):
                    net(torch.ones(4096, 2048, device=here.device)).square().mean().backward()
            report(comm=profiler.stats())
        """
    )
    code = "import torch; print(torch.cuda.device_count())"
    if subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "0\n":
        pytest.skip("there is no GPU here")
    found = launch(path, nproc=1, backend="nccl").reported[0]["comm"]
    assert found["passes"] == 20 and found["backend"] == "nccl" and found["straggler"] is None
    assert 0 < found["backward_ms"] < found["step_ms"] and len(found["buckets"]) > 2
    assert all(bucket["ms"] > 0 for bucket in found["buckets"])
