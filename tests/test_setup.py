"""`setup`, `log_to` and the smoke test as ranks meet them: every sentence is brought about for real, in real processes."""

from __future__ import annotations

import json
import os
import re
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import HAS_NCCL, free_port

import ddpkit
from ddpkit import diagnose
from ddpkit.rank.joining import backends
from ddpkit.rank.joining.rollcall import Facts
from ddpkit.runfolder import wire

pytestmark = pytest.mark.job
NO_NCCL = "sees 0 GPUs, and its LOCAL_RANK is 0" if HAS_NCCL else "has a torch without NCCL"
Script = Callable[..., str]

# Ranks without torchrun: torch is imported once, then the ranks of all cases are forked, with an environment of their own.
RANKS = r"""
import json, logging, os, sys, time, traceback
import torch, torch.distributed as dist
import ddpkit.rank
from ddpkit.rank import setup

def run(rank, written):
    os.environ.update({k: v for k, v in rank.get("env", {}).items()})
    time.sleep(rank.get("late_s", 0))
    lines, began = [], time.monotonic()
    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(f"{record.levelname} {record.getMessage()}")
    logger = logging.getLogger("ddpkit.rank")
    logger.addHandler(Keep())
    logger.setLevel("INFO")
    found = {}
    try:
        exec(rank.get("before", ""), globals())
        with setup(**rank.get("call", {})) as here:
            ids = torch.ones(1)
            dist.all_reduce(ids)
            found = {"sum": ids.item(), "backend": here.backend, "here": repr(here)}
            exec(rank.get("inside", ""), {"here": here, "found": found, **globals()})
    except BaseException as error:
        found = {**found, "type": type(error).__name__, "said": str(error)}
    found["left_up"] = dist.is_initialized()
    with open(written, "w") as file:
        json.dump({**found, "lines": lines, "took_s": time.monotonic() - began}, file)

cases, pids = json.load(sys.stdin), []
for number, ranks in enumerate(cases):
    for i, rank in enumerate(ranks):
        if not (pid := os.fork()):
            try:
                run(rank, f"{number}_{i}.json")
            finally:
                os._exit(0)
        pids.append(pid)
for pid in pids:
    os.waitpid(pid, 0)
"""
TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_DIST_TIMEOUT")
NOT_FOR_RANKS = (*TOLD, "DDP_BACKEND", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "DDPKIT_RUN")


def ranks_of(home: Path, *cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What became of each rank of each case. A rank is `env` on top of nothing, `call` for setup's arguments, `inside` to run
    while the group is up, `before` to run first, and `late_s` for when it comes."""
    env = {k: v for k, v in os.environ.items() if k not in NOT_FOR_RANKS}
    done = subprocess.run(
        [sys.executable, "-c", RANKS],
        input=json.dumps(cases),
        text=True,
        capture_output=True,
        cwd=home,
        env=env,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return [
        [json.loads((home / f"{n}_{i}.json").read_text()) for i in range(len(ranks))] for n, ranks in enumerate(cases)
    ]


def a_job(size: int, port: int | None = None, **changed: str) -> list[dict[str, Any]]:
    """`size` ranks as somebody would start them by hand; `changed` goes into the environment of all."""
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port or free_port()), "WORLD_SIZE": str(size)}
    return [{"env": {**where, "RANK": str(r), "LOCAL_RANK": str(r), **changed}, "call": {}} for r in range(size)]


def warnings(rank: dict[str, Any]) -> list[str]:
    return [line for line in rank["lines"] if line.startswith("WARNING")]


def test_what_is_wrong_in_the_environment_is_said_in_a_sentence(home: Path) -> None:
    """Before anybody is waited for; and the log tells the step, and what is set for NCCL."""
    wrong: list[tuple[dict[str, str], dict[str, Any], str]] = [
        (
            {"MASTER_ADDR": "no-such-host.invalid"},
            {"timeout_s": 0.5},
            'MASTER_ADDR="no-such-host.invalid" has no address',
        ),
        (
            {"WORLD_SIZE": ""},
            {},
            "setup: WORLD_SIZE is not set, though RANK=0, MASTER_ADDR=localhost, MASTER_PORT=29 are. ",
        ),
        (
            {"MASTER_ADDR": "", "WORLD_SIZE": "", "MASTER_PORT": ""},
            {},
            "WORLD_SIZE is not set, though RANK=0 is. Was the",
        ),
        ({"MASTER_PORT": ""}, {}, "It sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; whoever starts ranks otherwise"),
        ({"WORLD_SIZE": "two"}, {}, 'setup: WORLD_SIZE="two" is not an integer. torchrun sets it: remove the line'),
        ({"RANK": "2"}, {}, "setup: RANK=2, but WORLD_SIZE=2: ranks count from 0, so the last is 1."),
        ({"WORLD_SIZE": "0"}, {}, "RANK=0, but WORLD_SIZE=0: ranks count from 0, and there must be one at least."),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"}, {}, "LOCAL_RANK=3, but LOCAL_WORLD_SIZE=2: ranks count from 0"),
        ({"MASTER_PORT": "70000"}, {}, "setup: MASTER_PORT=70000 is no port; ports go from 1 to 65535."),
        ({"TORCH_DIST_TIMEOUT": "soon"}, {}, "setup: TORCH_DIST_TIMEOUT=soon is no number of seconds above 0."),
        ({}, {"timeout_s": 0}, "setup: timeout_s=0 is no number of seconds above 0."),
    ]
    sound = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29"}
    cases = [[{"env": {**sound, "NCCL_DEBUG": "WARN", **env}, "call": call}] for env, call, _ in wrong]
    for [found], (_, _, says) in zip(ranks_of(home, *cases), wrong, strict=True):
        assert says in found["said"] and "\n" not in found["said"], found
        assert found["took_s"] < 40 and not found["left_up"]
        error = next(line for line in found["lines"] if line.startswith("ERROR"))
        assert "which is a matter of the network. " in error or "'environment', which is a matter of the env" in error
        assert f"{found['type']}: {found['said']}" in error
        assert "Variables of NCCL, gloo and CUDA: NCCL_DEBUG=WARN" in error


class HangsUp(socketserver.BaseRequestHandler):
    """Listens as another program's server does, which makes nothing of what a store's client says."""


def test_a_store_that_cannot_be_reached_is_named(home: Path) -> None:
    """A port that is taken, one where nobody listens, one where somebody else does; a warning comes before the timeout."""
    with socketserver.TCPServer(("localhost", 0), HangsUp) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        taken, nobody = other.server_address[1], free_port()
        cases = [a_job(2, taken)[:1], a_job(2, nobody)[1:], a_job(2, taken)[1:]]
        for case, timeout_s in zip(cases, (60, 8, 1.5), strict=True):
            case[0]["call"] = {"timeout_s": timeout_s}
        [[hosts], [alone], [astray]] = ranks_of(home, *cases)
        other.shutdown()
    assert hosts["type"] == alone["type"] == astray["type"] == "DistNetworkError"
    assert hosts["said"] == (
        f"setup: rank 0 is to host the store at port {taken}, but the port is taken (address already in use). "
        f"`ss -ltnp | grep {taken}` names the holder: end it, or take another MASTER_PORT. "
        "torchrun --standalone takes a free port by itself."
    )
    assert hosts["took_s"] < 30
    asked = f"setup: rank 1 asked for the job's store at localhost:{nobody} (MASTER_ADDR, MASTER_PORT) for"
    assert warnings(alone)[0].startswith(
        f"WARNING {asked} 6 s, and nobody answered: Connection refused. See that rank 0"
    )
    assert warnings(alone)[0].endswith("Rank 1 goes on trying.")
    assert alone["said"].startswith(f"{asked} 8 s, and nobody answered: Connection refused.") and alone["took_s"] < 30
    assert "what listens there did not answer as a store of torch's does. If that is no rank of this" in astray["said"]
    assert any("'store', which is a matter of the network" in line for line in astray["lines"])


def test_the_roll_call_sees_what_is_wrong_between_ranks(home: Path) -> None:
    """All ranks end within moments, though the timeout is a minute, and each says the same or who has said it."""
    twice, sizes, differ, amiss, no_gpu, old = (a_job(n) for n in (3, 2, 2, 3, 2, 2))
    twice[2]["env"]["RANK"] = "1"
    sizes[1]["env"]["WORLD_SIZE"] = "3"
    differ[0]["call"], differ[1]["env"]["DDP_BACKEND"] = {"backend": "gloo"}, "nccl"
    amiss[1]["call"] = {"backend": "glooo"}
    for rank in no_gpu:
        rank["call"] = {"backend": "nccl"}
    old[1]["before"] = "torch.__version__ = '1.0.0'"
    for rank in (*twice, *sizes, *differ, *amiss, *no_gpu, *old):
        rank["call"].setdefault("timeout_s", 60)
    found = ranks_of(home, twice, sizes, differ, amiss, no_gpu, old)
    assert all(rank["took_s"] < 40 for case in found for rank in case)
    twice, sizes, differ, amiss, no_gpu, old = found
    assert all("setup: two processes are rank 1: pid " in rank["said"] for rank in twice)
    assert all("Each needs a RANK of its own; torchrun gives it." in rank["said"] for rank in twice)
    assert sum(rank["type"] == "ValueError" for rank in twice) == 1
    assert all(re.search(r"was told WORLD_SIZE=\d, rank \d WORLD_SIZE=\d\. All ranks", r["said"]) for r in sizes)
    # A rank that is told of another's failure before it comes to its own says whose that was.
    told = re.compile(r"^setup: rank \d failed in its setup: ValueError: ")
    assert {told.sub("", rank["said"]) for rank in differ} == {
        "setup: the ranks ask for different backends: gloo (rank 0), nccl (rank 1). "
        "All need the same argument or DDP_BACKEND."
    }
    assert amiss[1]["said"] == 'setup: backend "glooo" is not one of gloo, nccl.'
    for rank in (amiss[0], amiss[2]):
        assert rank["type"] == "RuntimeError"
        assert rank["said"] == f"setup: rank 1 failed in its setup: ValueError: {amiss[1]['said']}"
    assert {told.sub("", rank["said"]) for rank in no_gpu} == {
        f'setup: backend "nccl" asked for, but rank 0 {NO_NCCL}; '
        'use backend="gloo", as many ranks as GPUs, fallback=True, or share the GPUs by launch(share_gpu=True).'
    }
    assert not any(rank["left_up"] for rank in (*no_gpu, *amiss, *old))
    assert [rank["sum"] for rank in old] == [2.0, 2.0] and not warnings(old[1])
    versions = r"WARNING setup: the torch versions differ between ranks: \S+ \(rank 0\), 1\.0\.0 \(rank 1\)\."
    assert re.fullmatch(versions, warnings(old[0])[0])


def test_whoever_is_missing_is_named_while_it_is_waited_for_and_at_the_timeout(home: Path) -> None:
    missing, late = a_job(3, TORCH_DIST_TIMEOUT="12")[:2], a_job(2)
    late[1]["late_s"] = 13
    missing, late = ranks_of(home, missing, late)
    for rank in missing:
        # Where a rank was slow to reach the store, it is missed as well.
        assert any(re.search(r"WARNING setup: rank [01] waits for ranks? ([01], )?2 of 3\.", w) for w in warnings(rank))
        assert "setup: rank 2 of 3 did not come within 12 s (wait timeout after 12000ms, keys: " in rank["said"]
        assert "look at its stderr and its stack" in rank["said"]
    # Of two that wait for the same rank, the one that gives up first tells the other.
    assert "DistStoreError" in {rank["type"] for rank in missing}
    assert "WARNING setup: rank 0 waits for rank 1 of 2." in warnings(late[0]) and late[0]["sum"] == 2.0


# Nothing that was asked for in vain.

A_BACKEND = """
def make(store, rank, size, timeout):
    if rank == {fails}:
        raise OSError("no such interface: ib7\\nand more")
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout)      # comes up by itself
dist.Backend.register_backend("theirs", make, devices=["cpu"])
"""


def test_all_ranks_fall_back_to_gloo_or_none_does(home: Path) -> None:
    """Where the facts forbid NCCL, and where a backend does not come up on one rank: here the program's own, which comes up
    on rank 0 alone. Not where one rank was not asked, and never without a word."""
    facts, one_alone, raises, no_fallback, comes_up = (a_job(2) for _ in range(5))
    for rank in (*facts, one_alone[0]):
        rank["call"] = {"backend": "nccl", "fallback": True}
    one_alone[1]["call"] = {"backend": "nccl"}
    for case, fails, fallback in ((raises, 1, True), (no_fallback, 1, False), (comes_up, 2, True)):
        for rank in case:
            rank["before"] = A_BACKEND.format(fails=fails)
            rank["call"] = {"backend": "theirs", "fallback": fallback, "timeout_s": 30}
    facts, one_alone, raises, no_fallback, comes_up = ranks_of(home, facts, one_alone, raises, no_fallback, comes_up)
    for rank in (*facts, *raises):
        assert (rank["sum"], rank["backend"], rank["left_up"]) == (2.0, "gloo", False)
    slow = "slower, for debugging only."
    for rank in facts:
        assert warnings(rank) == [f"WARNING setup: fell back to gloo: rank 0 {NO_NCCL}; {slow}"]
    why = "theirs did not come up on rank 1 (OSError: no such interface: ib7)"
    for rank in raises:
        assert warnings(rank) == [f"WARNING setup: fell back to gloo: {why}; {slow}"]
    assert all("fallback=True, or share" in rank["said"] for rank in one_alone)
    assert no_fallback[1]["type"] == "OSError" and not any(rank["left_up"] for rank in no_fallback)
    assert no_fallback[0]["said"].startswith("setup: rank 1 failed in its setup: OSError: no such interface: ib7")
    error = next(line for line in no_fallback[1]["lines"] if line.startswith("ERROR"))
    assert "'init_process_group', which is a matter of the network or NCCL. OSError: no such interface" in error
    assert [rank["backend"] for rank in comes_up] == ["theirs", "theirs"] and not warnings(comes_up[0])


def facts(rank: int, **changed: Any) -> Facts:
    sound = Facts(rank, 2, "node0", 100 + rank, None, False, "", f"GPU-{rank}", "2.13.0", "2.27.5")
    return replace(sound, **changed)


def test_the_backend_follows_from_the_facts_of_all_ranks() -> None:
    """On hosts with GPUs, which this machine need not be."""
    assert backends.decide([facts(0), facts(1)]).backend == "nccl"
    one_without = [facts(0), facts(1, gpu="", no_nccl="sees 1 GPU, and its LOCAL_RANK is 1")]
    choice = backends.decide(one_without)
    assert (choice.backend, choice.why) == ("gloo", "rank 1 sees 1 GPU, and its LOCAL_RANK is 1")
    shared = [facts(0, backend="nccl"), facts(1, backend="nccl", gpu="GPU-0")]
    with pytest.raises(ValueError, match=r"ranks 0 and 1 are on the same GPU, GPU-0 \(NCCL would say: Duplicate GPU"):
        backends.decide(shared)
    assert backends.decide([replace(f, fallback=True) for f in shared]).backend == "gloo"
    assert backends.decide([replace(f, backend=None) for f in shared]).backend == "gloo"
    assert not backends.differences([facts(0), facts(1)])
    [said] = backends.differences([facts(0), facts(1, nccl="2.21.5")])
    assert said == "setup: the NCCL versions differ between ranks: 2.27.5 (rank 0), 2.21.5 (rank 1)."


# Under torchrun.

DIES_ONCE = """
import os, signal
import torch, torch.distributed as dist
from ddpkit.rank import report, setup

with setup() as here:
    dist.all_reduce(torch.ones(1))
    here.store.set(f"before/{here.rank}", os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.barrier()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    kept = [here.store.get(f"before/{r}").decode() for r in range(here.world_size)]
with setup() as here:
    ids = torch.tensor([float(here.rank)])
    dist.all_reduce(ids)
    report(sum=ids, kept=kept, again=here.store.check(["before/0"]))
"""


def launch(path: str, **options: Any) -> ddpkit.Run:
    return ddpkit.launch(path, show=False, **{"timeout": 120, "backend": "gloo", **options})


def test_restarted_ranks_meet_though_torchruns_store_holds_the_attempt_before(script: Script) -> None:
    """Rank 1 kills itself. torch's own start fails there in most cases: it meets addresses of processes that are gone."""
    run = launch(script(DIES_ONCE), max_restarts=1)
    assert run.ok and len(run.attempts) == 2, str(run)
    assert run.reported[0] == run.reported[1] == {"sum": [1.0], "kept": ["1", "1"], "again": False}


RESTARTED_FROM_OUTSIDE = """
import os, signal
from pathlib import Path
import torch.distributed as dist
from ddpkit.rank import setup

died = Path("died")
first = not died.exists()
with setup() as here:
    dist.barrier()
    if first and here.rank == 1:
        died.touch()
        os._exit(1)
    if first:
        signal.pause()
    Path(f"rank_{here.rank}").write_text(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.barrier()
"""


def test_agents_that_count_restarts_apart_meet_too(home: Path) -> None:
    """The agent of a host where nobody failed does not count the restart, and tells its ranks so."""
    (home / "train.py").write_text(RESTARTED_FROM_OUTSIDE)
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "two"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meet]
    command += ["--max-restarts", "2", "train.py"]
    agents = [subprocess.Popen(command, cwd=home, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        told = [agent.communicate(timeout=100)[1] for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait(60)
    assert [agent.returncode for agent in agents] == [0, 0], told
    assert sorted((home / f"rank_{r}").read_text() for r in (0, 1)) == ["0", "1"]


def test_each_step_is_logged_in_a_file_of_each_rank_and_errors_by_everybody(script: Script, home: Path) -> None:
    path = script(
        """
        import logging
        from ddpkit.rank import log_to, setup

        log = log_to("logs", "debug")
        log_to("logs", "info")                      # in the place of the first
        with setup() as here:
            log.debug("not this")
            logging.getLogger("ddpkit.rank.somewhere").warning("step %d is slow", 3)
            print("printed")
            try:
                {}["missing"]
            except KeyError:
                if here.rank == 1:
                    log.exception("step 3 failed")
        raise SystemExit(0 if here.rank == 0 else "over")
        """
    )
    run = launch(path)
    zero, one = ((home / "logs" / f"rank_{r}.log").read_text() for r in (0, 1))
    steps = [re.sub(r"^[-\d]+ [\d:,]+ \[rank0\]: ", "", line) for line in zero.splitlines()]
    assert all(line.startswith("[DDP-INFO] ") for line in steps[:-1])
    said = [line.removeprefix("[DDP-INFO] ") for line in steps]
    heads = "environment versions devices store roll backend device init_process_group init_process_group rank".split()
    assert [line.split()[0].rstrip(":") for line in said[:-1]] == heads
    assert said[0].startswith("environment: RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2, MASTER_ADDR=")
    assert re.fullmatch(r"versions: Python 3\S+, torch \S+, CUDA .+, NCCL .+", said[1])
    assert said[4:7] == ["roll call: 2 ranks on 1 host", "backend: gloo (asked for)", "device: cpu"]
    assert said[7] == "init_process_group: gloo, 2 ranks, timeout torch's own"
    assert re.fullmatch(r"init_process_group: done in \d\.\d+ s", said[8])
    assert said[9] == "rank 0 of 2 is up: gloo on cpu" and said[10] == "[DDP-WARNING] step 3 is slow"
    assert zero.count("step 3 is slow") == 1
    assert run.ranks[0].stdout == "".join(f"{line}\n" for line in [*steps, "printed"]) and not run.ranks[0].stderr
    assert run.ranks[1].stdout == "printed\n" and "rank 1 of 2 is up: gloo on cpu" in one
    assert "[rank1]: [DDP-ERROR] step 3 failed\n[rank1]: Traceback" in run.ranks[1].stderr
    assert re.search(r"^\S+ [\d:]+,\d{3} \[rank1\]: KeyError: 'missing'$", one, re.MULTILINE)
    mixed = home / "all.log"
    mixed.write_text(zero + one)
    for log in (mixed, home / "logs" / "rank_1.log"):
        found = diagnose(log)
        assert found is not None and found.rank == 1, str(found)


def test_a_rank_of_a_ddpkit_job_logs_into_its_own_folder(script: Script, home: Path) -> None:
    path = script(
        """
        from ddpkit.rank import log_to
        log_to(as_json=True).info("one %s", "line")
        try:
            1 / 0
        except ZeroDivisionError:
            log_to(as_json=True).exception("no")
        """
    )
    run = launch(path)
    for rank in (0, 1):
        first, second = map(json.loads, (wire.rank_folder(run.folder, 0, rank) / wire.LOG).read_text().splitlines())
        assert (first["rank"], first["level"], first["message"]) == (rank, "INFO", "one line")
        assert second["level"] == "ERROR" and second["exception"].endswith("ZeroDivisionError: division by zero")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", second["time"])
        assert json.loads(run.ranks[rank].log.splitlines()[0]) == first
    assert run.ranks[0].stdout == "[DDP-INFO] one line\n"


def test_outside_a_job_only_the_console_is_written_and_a_level_must_be_known(home: Path) -> None:
    code = """
import logging, os
from ddpkit.rank import log_to
log = log_to(level="WARNING")
for level in (10, 20, 30, 40, 50):
    log.log(level, "at %d", level)
os.environ["RANK"] = "3"
log_to("logs", as_json=True).error("at last")
try:
    log_to(level="LOUD")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    unknown = 'log_to: level "LOUD" is not one of DEBUG, INFO, WARNING, ERROR, CRITICAL.\n'
    assert done.stdout == f"[DDP-WARNING] at 30\n{unknown}"
    errors = ["[rank0]: [DDP-ERROR] at 40", "[rank0]: [DDP-CRITICAL] at 50", "[rank3]: [DDP-ERROR] at last"]
    assert done.stderr.splitlines() == errors
    assert [path.name for path in home.rglob("*") if path.is_file()] == ["rank_3.jsonl"]
    assert json.loads((home / "logs" / "rank_3.jsonl").read_text())["message"] == "at last"


# The smoke test.


def smoke(*arguments: str, start: list[str] | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(start or ["-m"]), "ddpkit.rank.smoke", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **env})


def test_the_smoke_test_takes_six_steps_and_its_exit_code_tells(home: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    alone, two, launched = smoke(), smoke(start=torchrun), launch("ddpkit.rank.smoke", nproc=3)
    assert alone.returncode == two.returncode == 0 and launched.ok, (alone.stderr, two.stderr, str(launched))
    for said, size in ((alone.stdout, 1), (two.stdout, 2), (launched.ranks[0].stdout, 3)):
        lines = said.splitlines()
        assert [line[:6] for line in lines] == [f"[{n}/6] " for n in range(1, 7)]
        assert lines[2] == f"[3/6] init: gloo, {size} rank{'s' if size > 1 else ''}" and lines[3] == "[4/6] device: cpu"
        expected = size * (size - 1) // 2
        assert lines[4:] == [
            f"[5/6] all-reduce: got {expected}, expected {expected}",
            "[6/6] barrier and destroy: done, all steps passed",
        ]
    assert not launched.ranks[1].stdout
    before = smoke(RANK="0")
    during = smoke("--timeout", "1", RANK="1", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
    assert before.returncode == during.returncode == 1
    assert "[1/6] failed on rank 0: ValueError: setup: WORLD_SIZE is not set" in before.stderr
    assert "[1/6] Before init: a matter of the environment." in before.stderr
    assert "[3/6] failed on rank 1: DistNetworkError: setup: rank 1 asked for the job's store" in during.stderr
    assert "[3/6] During init: a matter of the network, of NCCL," in during.stderr


def test_the_smoke_test_after_init_speaks_of_the_device(script: Script) -> None:
    """A device that cannot be used, and a rank that leaves before the all-reduce: neither passes."""
    path = script(
        """
        import sys, torch
        from ddpkit.rank import smoke
        if sys.argv[1] == "device":
            torch.set_default_dtype(torch.float32)
            torch.tensor = lambda *_, **__: torch.ones(1, device="cuda")
        else:
            torch.Tensor.item = lambda self: 7.0
        smoke.main([])
        """
    )
    device, wrong = launch(path, args=["device"]), launch(path, args=["sum"])
    assert device.state == wrong.state == "failed"
    assert "[4/6] After init: a matter of the device." in device.ranks[0].stderr
    assert "RuntimeError: smoke: all-reduce of the ranks' ids gave 7, not 1." in wrong.ranks[0].stderr
    assert "[5/6] After init: a matter of the device, or of the way between devices." in wrong.ranks[0].stderr


def test_a_second_group_is_refused_and_the_first_stays(home: Path) -> None:
    """Left, it makes room for the next; whatever is raised inside comes through, and nothing stays up."""
    [rank] = a_job(1)
    rank["inside"] = """
try:
    setup().__enter__()
except RuntimeError as error:
    found["refused"], found["still"] = str(error), dist.is_initialized()
raise KeyError("mine")
"""
    alone = {"env": {}, "call": {}, "inside": "here.store.set('a', 'b'); found['got'] = here.store.get('a').decode()"}
    [rank], [alone] = ranks_of(home, [rank], [alone])
    assert rank["refused"].startswith("setup: a process group is up already in this process. Leave the `with setup()`")
    assert rank["still"] and rank["type"] == "KeyError" and not rank["left_up"]
    assert alone["got"] == "b" and alone["here"] == (
        "Here(rank=0, local_rank=0, world_size=1, local_world_size=1, backend='gloo', device=device(type='cpu'))"
    )
