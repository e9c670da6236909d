"""`ddpkit diagnose`: recorded logs lead to their failures, in every shape that logs have, cut anywhere; healthy ones to none."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_diagnosis import REAL, VICTIMS

import ddpkit
from ddpkit import LogError, diagnose
from ddpkit.diagnosis.log.causes import OF_ANOTHER
from ddpkit.diagnosis.log.lines import Source, chunks, sources
from ddpkit.diagnosis.log.literals import required
from ddpkit.diagnosis.log.scan import scan
from ddpkit.diagnosis.pages import page, pages
from ddpkit.diagnosis.run import HEALTHY, UNKNOWN
from ddpkit.verdict.finding import Culprit

RECORDED = Path(__file__).with_name("recorded")
DOCUMENTED = tomllib.loads(Path(__file__).with_name("documented.toml").read_text())["message"]
TRAINING = "".join(f"epoch 1 step {i} loss 0.{900 - i} lr 3e-4\n" for i in range(40))


@dataclass(frozen=True)
class Recorded:
    """A log of a real run, and what it tells."""

    file: str
    failure: str
    by: str
    rank: Culprit = None

    @property
    def path(self) -> Path:
        return RECORDED / self.file

    @property
    def text(self) -> str:
        return self.path.read_bytes().decode("utf-8", "replace")


def recorded() -> list[Recorded]:
    rows = tomllib.loads((RECORDED / "logs.toml").read_text())["log"]
    return [
        Recorded(
            r["file"], r["failure"], r["by"], tuple(r["rank"]) if isinstance(r.get("rank"), list) else r.get("rank")
        )
        for r in rows
    ]


LOGS = recorded()
FAILED = [log for log in LOGS if log.failure != HEALTHY]


def ddpkit_diagnose(*words: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    command = [str(Path(sys.executable).with_name("ddpkit")), "diagnose", *words]
    return subprocess.run(command, capture_output=True, input=stdin, timeout=120, check=False)


# What each log tells.


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.file)
def test_a_recorded_log_leads_to_its_failure(log: Recorded) -> None:
    found = diagnose(log.path)
    assert (found.name, found.rank) == (log.failure, log.rank), str(found)
    lines = log.text.split("\n")
    for each in (*found.evidence, *found.consequences):
        assert each.file == str(log.path)
        assert re.sub(r"\W", "", each.text)[-20:] in re.sub(r"\x1b\[[\d;]*m|\W", "", lines[each.line - 1]), each
    assert bool(found.evidence) == (log.failure not in (HEALTHY, UNKNOWN))


def test_every_recorded_log_is_entered() -> None:
    assert sorted(log.file for log in LOGS) == sorted(str(p.relative_to(RECORDED)) for p in RECORDED.rglob("*.log"))
    assert len({log.failure for log in LOGS}) >= 30 and sum(log.failure == HEALTHY for log in LOGS) >= 5


@pytest.mark.parametrize("message", DOCUMENTED, ids=lambda m: f"{m['page']}: {m['text'][:40]}")
def test_a_documented_message_is_known_to_its_page_and_to_no_other(message: dict[str, str]) -> None:
    own = page(message["page"])
    assert message["source"]
    text = re.sub(r"^\[rank\d+\]: |^(?:\w+\.)+(?=\w+: )", "", message["text"])
    assert any(s.text and s.pattern.search(t) for s in own.signatures for t in (message["text"], text)), "its own page"
    for other in pages():
        for s in other.signatures:
            specific = s.text and not (s.general or s.consequence or s.beside or s.type)
            if (
                other is not own
                and specific
                and not any(x.general or x.spans_lines for x in own.signatures if x.pattern.search(text))
            ):
                assert not s.pattern.search(text), f"{other.name} claims it: {s.text}"


def test_every_signature_has_a_recorded_or_a_documented_message() -> None:
    plain = [re.sub(r"^\[(rank|default)\d+\]: ?", "", log.text, flags=re.MULTILINE) for log in LOGS]
    for each in pages():
        said = [s for name, s in REAL if name == each.name]
        texts = [t for s in said for t in (f"{s.type}: {s.message}" if s.message else s.type, s.stderr, s.torchrun)]
        texts += [f"{kind}: {text}" for s in said for kind, text in s.chain]
        texts += (
            [text for _, text in VICTIMS]
            + ['"exitcode": 1']
            + [m["text"] for m in DOCUMENTED if m["page"] == each.name]
        )
        texts += [re.sub(r"^(?:\w+\.)+(?=\w+: )", "", text) for text in texts]
        for signature in each.signatures:
            if signature.text:
                found = any(signature.pattern.search(t) for t in [*texts, *plain])
                assert found, f"{each.name}: nothing tests {signature.text}"


def test_a_signature_that_logs_of_other_failures_hold_is_never_certain() -> None:
    for log in LOGS:
        for hit in scan(sources([log.path])).hits:
            signature = hit.signature
            known = hit.page.name == log.failure or signature.consequence or signature.beside or signature.general
            assert known or signature.shared, f"{log.file} holds it too: {hit.page.name}, {signature.text}"


def test_every_page_but_the_silent_ones_is_reached() -> None:
    by_verdict = {p.name for p in pages() if any(s.verdict for s in p.signatures)}
    said = {name for name, _ in REAL} | {m["page"] for m in DOCUMENTED}
    assert {p.name for p in pages() if p.signatures} == by_verdict | said


def test_a_log_can_be_searched_for_every_signature() -> None:
    """Each has a word that must be in what it matches; so a line without any of them need not be looked at."""
    for each in pages():
        for signature in each.signatures:
            if signature.in_logs:
                assert required(signature.pattern), (
                    f"{each.name}: no word of four letters is in every match of {signature.text}"
                )


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("CUDA out of memory", {"cuda out of memory"}),
        (r"(CUDA|HIP) out of memory", {"cuda out of memory", "hip out of memory"}),
        (r"(?i)loss (is|became) nan", {"loss is nan", "loss became nan"}),
        (r"[Ss]ocket +timeout", {"timeout"}),
        (r"in rebuild_storage_fd\n[\s\S]*Errno 24", {"in rebuild_storage_fd"}),
        (r"\d+ a \d+", set()),
        (r"(long word|ab)", set()),
        (r"(?:maybe)?certainly", {"certainly"}),
    ],
)
def test_the_words_of_a_pattern(pattern: str, words: set[str]) -> None:
    assert required(re.compile(pattern)) == words


# The shapes that logs have.


def srun(rank: int, line: str) -> str:
    return f"{rank}: {line}"


def kubectl(rank: int, line: str) -> str:
    return f"2026-03-01T12:00:{rank:02d}.123456789Z [rank{rank}]: {line}"


def teed(rank: int, line: str) -> str:
    return f"[default{rank}]:{line}"


def mpirun(rank: int, line: str) -> str:
    return f"[1,{rank}]<stderr>:{line}"


def ray(rank: int, line: str) -> str:
    return f"\x1b[36m(RayTrainWorker pid=41{rank}, ip=10.0.0.{rank})\x1b[0m [rank{rank}]: {line}"


def docker(rank: int, line: str) -> str:
    return (
        json.dumps({"log": f"[rank{rank}]: {line}\n", "stream": "stderr", "time": "2026-03-01T12:00:00Z"})
        .replace('": ', '":')
        .replace(', "', ',"')
    )


def journal(rank: int, line: str) -> str:
    return f"Mar 01 12:00:00 node7 train[4{rank}]: [rank{rank}]: {line}"


SHAPES: list[Callable[[int, str], str]] = [srun, kubectl, teed, mpirun, ray, docker, journal]
OWN = """Traceback (most recent call last):
  File "/home/you/train.py", line 41, in <module>
    main()
  File "/home/you/train.py", line 12, in main
    loss = net(batch)
KeyError: 'image'"""
LOST = """Traceback (most recent call last):
  File "/home/you/train.py", line 12, in main
    dist.all_reduce(loss)
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:29500"""


def interleaved(shape: Callable[[int, str], str], seed: int = 0) -> str:
    """Rank 2 raises and the others lose it, their lines mixed as they come; training before it."""
    dice = random.Random(seed)
    queues = {rank: (OWN if rank == 2 else LOST).split("\n") for rank in range(4)}
    lines = [shape(rank, f"epoch 0 step {step} loss 0.5") for step in range(30) for rank in range(4)]
    while any(queues.values()):
        rank = dice.choice([r for r, queue in queues.items() if queue])
        lines.append(shape(rank, queues[rank].pop(0)))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_interleaved_ranks_are_told_apart_whatever_stands_before_their_lines(shape: Callable[[int, str], str]) -> None:
    for seed in range(5):
        found = diagnose(interleaved(shape, seed))
        assert (found.name, found.rank, found.confidence) == ("own_exception", 2, "certain"), str(found)
        assert found.sentence == "Rank 2 raised KeyError at /home/you/train.py:12: loss = net(batch)."
        assert {c.rank for c in found.consequences} == {0, 1, 3}


@pytest.mark.parametrize(
    ("before", "rank"),
    [
        *(
            (each, None)
            for each in ("c00000{r}: ", "ip-10-0-0-{r}: ", "h{r}.local: ", "algo-{r}-abcde  | ", "trainer/{r} ")
        ),
        *((each, None) for each in ("(train, pid=312{r}) ", "train-x{r} pytorch ", "[pod/job-x{r}yz1/main] ")),
        ("2026-01-01 10:00:{n:02d},{n:03d} host-{r} INFO ", None),
        *((each, 2) for each in ("rank {r}: ", "[{r}]: ", "[1,{r}]<stderr>:", "(main, rank={r}) ")),
        *(
            (each, None)
            for each in ("stderr: ", "| ", "> ", "launcher: ", "{n:4d}  ", "{n}: ", "{n:6d}\t", "{n:3d} | ")
        ),
    ],
)
def test_what_precedes_the_lines_is_learned_from_a_traceback(before: str, rank: int | None) -> None:
    dice = random.Random(0)
    queues = {r: (OWN if r == 2 else LOST).split("\n") for r in (range(4) if "{r}" in before else (2,))}
    for ahead in ("", TRAINING):
        rows = [(0, line) for line in ahead.splitlines()]
        todo = {r: list(queue) for r, queue in queues.items()}
        while any(todo.values()):
            r = dice.choice([r for r, queue in todo.items() if queue])
            rows.append((r, todo[r].pop(0)))
        text = "".join(f"{before.format(r=r, n=n)}{line}\n" for n, (r, line) in enumerate(rows, 1))
        found = diagnose(text)
        assert (found.name, found.rank) == ("own_exception", rank), str(found)
        assert found.sentence.endswith("raised KeyError at /home/you/train.py:12: loss = net(batch).")


def test_progress_bars_colours_and_odd_bytes_do_not_hide_the_line() -> None:
    bars = b"".join(b"\rEpoch 0: %d%%|\xe2\x96\x88  | %d/99 [00:01<00:02, 3.1it/s]" % (i, i) for i in range(99))
    error = b"\x1b[31mtorch.cuda.OutOfMemoryError\x1b[0m: CUDA out of memory. Tried to allocate 2.00 GiB \xff\xfe"
    found = diagnose((b"one\ntwo\n" + bars + b"\r" + error + b"\r\n").decode("utf-8", "replace"))
    assert (found.name, found.evidence[0].line) == ("out_of_memory_cuda", 3)
    assert found.evidence[0].text.startswith("torch.cuda.OutOfMemoryError: CUDA out of memory")


def test_a_rank_is_told_by_the_names_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "none_ab12" / "attempt_0"
    for rank in range(3):
        (folder / str(rank)).mkdir(parents=True)
        (folder / str(rank) / "stderr.log").write_text(OWN if rank == 1 else LOST)
        (tmp_path / f"train_rank{rank}.log").write_text(OWN if rank == 1 else LOST)
    for asked in ([tmp_path / "logs"], sorted(tmp_path.glob("*.log")), [str(tmp_path / "train_rank*.log")]):
        found = diagnose(*asked)
        assert (found.name, found.rank, [c.rank for c in found.consequences]) == ("own_exception", 1, [0, 2])


def test_several_ranks_with_the_same_error_are_one_failure() -> None:
    error = "RuntimeError: Expected to mark a variable ready only once. This error is caused by"
    found = diagnose("".join(f"[rank{rank}]: {error}\n" for rank in range(4)))
    assert (found.name, found.rank, len(found.evidence)) == ("marked_ready_twice", "every rank", 4)
    found = diagnose(
        "".join(f"[rank{rank}]: {error}\n" for rank in (1, 3)) + "[rank0]: all well\n[rank2]: Error: cannot\n"
    )
    assert found.name == "marked_ready_twice"


def test_packed_logs_and_standard_input_are_read(tmp_path: Path) -> None:
    (tmp_path / "train.log.gz").write_bytes(gzip.compress(OWN.encode()))
    assert diagnose(tmp_path / "train.log.gz").name == diagnose(tmp_path).name == "own_exception"
    ran = ddpkit_diagnose("-", stdin=OWN.encode())
    assert ran.returncode == 1 and b"<stdin>:6: KeyError: 'image'" in ran.stdout


@pytest.mark.job
def test_torchruns_error_files_are_read(tmp_path: Path) -> None:
    """What `@record` writes: one object of JSON with the traceback inside."""
    folder = tmp_path / "attempt_0" / "3"
    folder.mkdir(parents=True)
    record = "from torch.distributed.elastic.multiprocessing.errors import record"
    program = f"{record}\n@record\ndef main():\n    raise KeyError('image')\nmain()"
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, timeout=120, check=False)
    found = diagnose(tmp_path)
    assert (found.name, found.rank, found.evidence[0].text) == ("own_exception", 3, "KeyError: 'image'"), found


def test_a_run_is_diagnosed_as_itself_from_its_folder_too(tmp_path: Path) -> None:
    from test_records import write_rank, write_run

    write_run(tmp_path)
    write_rank(tmp_path, 0, None, exitcode=0)
    write_rank(tmp_path, 1, {"type": "ValueError", "message": "boom", "chain": []})
    run = ddpkit.Run.from_folder(tmp_path)
    assert str(diagnose(run)) == str(diagnose(tmp_path)) == str(run.diagnosis)
    with pytest.raises(LogError, match="a run is diagnosed alone, but 2 things were named"):
        diagnose(run, run)


# Cut logs.


@pytest.mark.parametrize("log", FAILED, ids=lambda log: log.file)
def test_a_log_that_is_cut_is_never_taken_for_another_failure(log: Recorded) -> None:
    """At either end, anywhere: the same failure, less than that, or nothing; never something else."""
    dice = random.Random(log.file)
    lines = log.text.splitlines(keepends=True)
    less = {
        log.failure,
        HEALTHY,
        UNKNOWN,
        "summary_only",
        "peer_lost",
        "ended_from_outside",
        "own_exception",
        "exit_code",
    }
    less |= {"collective_timeout", "loader_worker_exception", "aborted", "killed", "import_error", "cannot_pickle"}
    less |= {"loader_worker_killed", "address_in_use", "wrong_address", "disk_full", "missing_rank_at_init"}
    for _ in range(12):
        begin, end = sorted(dice.sample(range(len(lines) + 1), 2))
        said = diagnose("".join(lines[begin:end]) + "\n")
        assert said.name in less, f"lines {begin} to {end}: {said}"


def test_torchruns_summary_alone_names_the_rank_and_asks_for_more() -> None:
    text = (RECORDED / "torchrun" / "a_rank_s_exception_met_by_others_as_a_closed_connection.log").read_text()
    found = diagnose(text[text.index("=====") :])
    assert (found.name, found.rank) == ("summary_only", 1) and "--log-dir" in found.collect


def test_a_traceback_that_is_cut_is_unknown_and_its_rest_is_asked_for() -> None:
    found = diagnose(TRAINING + "\n".join(OWN.split("\n")[:-1]) + "\n")
    assert found.name == UNKNOWN and found.evidence[0].line == 41 and "The rest of this log" in found.collect


# What came first, and what only followed.


def test_the_cause_is_found_behind_its_consequences() -> None:
    oom = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    lost = "".join(f"[rank{r}]: {LOST.splitlines()[-1]}\n" for r in range(3))
    found = diagnose(TRAINING + lost + oom + "\n")
    assert (found.name, found.rank, len(found.consequences)) == ("out_of_memory_cuda", 3, 3)


def test_what_a_scheduler_ended_did_not_fail_by_itself() -> None:
    limit = "slurmstepd: error: *** JOB 12 ON node1 CANCELLED AT 2026-03-01T12:00:00 DUE TO TIME LIMIT ***\n"
    worker = "RuntimeError: DataLoader worker (pid 21) is killed by signal: Terminated. \n"
    for text in (limit + worker, worker + limit, limit + LOST + "\n"):
        assert diagnose(TRAINING + text).name == "time_limit"
    assert diagnose(TRAINING + OWN + "\n" + limit).name == "own_exception"


def test_a_kernels_word_explains_the_death_that_a_rank_reports() -> None:
    died = "RuntimeError: DataLoader worker (pid 21) is killed by signal: Killed. \n"
    kernel = "[34569.809734] Memory cgroup out of memory: Killed process 21 (python) total-vm:1120644kB\n"
    assert diagnose(died).name == "loader_worker_killed"
    assert diagnose(died + kernel).name == "oom_killer"


def test_one_rank_that_was_done_while_the_others_waited() -> None:
    waits = "[rank{0}]:[E101 12:00:00.1 ProcessGroupNCCL.cpp:607] [Rank {0}] Watchdog caught collective operation timeout: Work\n"
    text = "[rank 2] epoch 0 finished after 311 batches\n" + "".join(waits.format(r) for r in (0, 1, 3))
    found = diagnose(text)
    assert (found.name, found.rank) == ("early_exit", 2)
    everyone = "".join(f"[rank {r}] epoch 0 finished after 311 batches\n" for r in range(4))
    assert diagnose(everyone + "".join(waits.format(r) for r in (0, 1, 3))).name == "collective_timeout"


def test_the_first_exception_of_a_chain_and_a_launchers_wrapper() -> None:
    wrapped = "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.\n"
    then = "The above exception was the direct cause of the following exception:"
    found = diagnose(f"{OWN}\n\n{then}\n\n{OWN.replace('KeyError', 'RuntimeError')}\n{wrapped}")
    assert found.evidence[0].line == 6 and found.name == "own_exception"


@pytest.mark.parametrize(
    ("first", "second", "certain"),
    [
        ("KeyError: 'image'", "IndexError: list index out of range", False),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            "OSError: [Errno 28] No space left on device",
            False,
        ),
        ("KeyError: 'image'", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", False),
        ("KeyError: 'image'", LOST.splitlines()[-1], True),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            "RuntimeError: rank 1 has failed",
            True,
        ),
    ],
)
def test_where_two_causes_compete_both_are_shown_and_none_is_certain(first: str, second: str, certain: bool) -> None:
    raised = [OWN.replace("KeyError: 'image'", said) for said in (first, second)]
    found = diagnose("\n".join(f"[rank{r}]: {line}" for r, text in enumerate(raised, 1) for line in text.split("\n")))
    assert (found.confidence == "certain") == certain, str(found)
    assert {each.rank for each in found.evidence} == ({1} if certain else {1, 2})


OMP = "W0301 12:0{0}:00.1 41 torch/distributed/run.py:774] Setting OMP_NUM_THREADS environment variable for each process\n"
IN_USE = (
    "torch.distributed.DistNetworkError: The server socket has failed to bind. EADDRINUSE, address already in use\n"
)
LATE = "[rank1]:[E301 12:09:00.1 ProcessGroupNCCL.cpp:607] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n"
STOPPED = 'Traceback (most recent call last):\n  File "/a.py", line 3, in f\n    x()\nKeyboardInterrupt\n'
KEYS = OWN.replace("KeyError: 'image'", 'RuntimeError: Missing key(s) in state_dict: "a"') + "\n"


def traceback(said: str, *frames: str) -> str:
    """A traceback that ends in `said`; each frame is a file and a function."""
    inside = "".join(
        '  File "{}", line 9, in {}\n    call()\n'.format(*frame.split()) for frame in ("/app/train.py main", *frames)
    )
    return f"Traceback (most recent call last):\n{inside}{said}\n"


THEN = "\nThe above exception was the direct cause of the following exception:\n\n"
ASKS = "/env/lib/python3.10/site-packages/torch/utils/data/dataloader.py _try_get_data"
DEAD = THEN + traceback("RuntimeError: DataLoader worker (pid(s) 71) exited unexpectedly", ASKS)
DELETED = "Exception ignored in: <function Iter.__del__ at 0x7f>\n" + traceback(
    "AssertionError: can only test a child process"
)
REPORTED = (
    "size mismatch for head.weight: copying a param with shape torch.Size([10]), the shape here is torch.Size([4]).\n"
)


@pytest.mark.parametrize(
    ("text", "name", "line"),
    [
        (traceback("_queue.Empty", ASKS) + DEAD, "loader_worker_killed", 15),
        (traceback("OSError: [Errno 9] Bad file descriptor", ASKS) + DEAD, "loader_worker_killed", 15),
        (
            traceback("RuntimeError: DataLoader worker (pid 7) is killed by signal: 9", ASKS) + DEAD,
            "loader_worker_killed",
            6,
        ),
        (DELETED + traceback("ValueError: boom"), "own_exception", 9),
        (DELETED + DELETED + TRAINING + traceback("KeyError: 3"), "own_exception", 54),
        (DELETED + THEN + traceback("OSError: gone") + traceback("KeyError: 3"), "own_exception", 16),
        (REPORTED + traceback("IndexError: list index out of range"), "own_exception", 5),
        ("Missing key(s) in state_dict: 'a'\nloaded\n" + traceback("TypeError: forward() takes 2"), "own_exception", 6),
        ("[rank0]: " + REPORTED + "[rank0]: KeyError: 3\n", "own_exception", 2),
    ],
)
def test_a_cause_is_not_what_only_came_near_it(text: str, name: str, line: int) -> None:
    found = diagnose(text)
    assert (found.name, found.evidence[0].line) == (name, line), str(found)


SIZES = "[rank{0}]:[E1 ProcessGroupNCCL.cpp:6] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={1}, "
SIZES += "OpType={2}, NumelIn={3}, NumelOut={3}, Timeout(ms)=600000) ran for 600007 milliseconds before timing out.\n"
IN_USE_98 = (
    "[W socket.cpp:426] [c10d] The server socket has failed to bind to {} (errno: 98 - Address already in use).\n"
)
SCALE = "[1,{0}]<stdout>:NaN or Inf found in input tensor.\n[1,{0}]<stdout>:Reducing loss scale to {1}\n"
SCALES = [SCALE.format(rank, 2.0**-i) for i in range(8) for rank in range(2)]
UNLIKE = "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 7, while rank 3 has inconsistent {} params.\n"
LOADS = "RuntimeError: Error(s) in loading state_dict for A:\n\t"
COPY = 'While copying the parameter named "fc.weight", whose dimensions are torch.Size([4]), an exception occurred : ("{}",).'
SEMLOCK = "/usr/lib/python3.10/multiprocessing/synchronize.py __init__"
MEGATRON = "/opt/env/lib/python3.10/site-packages/megatron/training/arguments.py validate_args"
RAY = "Worker unexpectedly exits with a connection error code 2. Potential root causes: (1) killed by SIGKILL by OOM killer."


@pytest.mark.parametrize(
    ("text", "name", "rank", "shown"),
    [
        # A message that goes on in the next line, or is glued to another.
        (
            "RuntimeError: [../gloo/unbound_buffer.cc:78]\nTimed out waiting 75000ms for recv operation\n",
            "collective_timeout",
            None,
            "75000ms",
        ),
        (
            "[rank1]: RuntimeError: [/gloo/transport/tcp/pair.cc:5]\n[rank1]: Connection closed by peer\n",
            "peer_lost",
            None,
            "closed by peer",
        ),
        (traceback("RuntimeError:\nCUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory_cuda", None, "2 GiB"),
        (TRAINING + "KeyboardInterruptKeyboardInterrupt\n", "ended_from_outside", None, ""),
        (STOPPED.rstrip() + STOPPED, "ended_from_outside", None, ""),
        ("KeyError: 'a key'KeyError: 'a key'\n", "own_exception", None, "a key"),
        (
            traceback("torch.Failed: backend='inductor' raised:\nNotImplementedError: turn off optimize_ddp"),
            "own_exception",
            None,
            "turn off",
        ),
        # What a broad word hides.
        (traceback(LOADS + COPY.format("CUDA error: device-side assert triggered")), "device_side_assert", None, ""),
        (traceback(LOADS + COPY.format("CUDA out of memory. Tried")), "out_of_memory_cuda", None, ""),
        (traceback(LOADS + 'Missing key(s) in state_dict: "a"'), "checkpoint_keys", None, ""),
        (UNLIKE.format(0), "peer_lost", 3, ""),
        (UNLIKE.format(9), "shapes_differ_between_ranks", None, ""),
        (f"(raylet) A worker died or was killed. {RAY}\n", "summary_only", None, "error code 2"),
        (
            traceback("OSError: [Errno 28] No space left on device", SEMLOCK).replace(
                "call()\nOSE", "_multiprocessing.SemLock(\nOSE"
            ),
            "loader_shared_memory",
            None,
            "",
        ),
        (traceback("OSError: [Errno 28] No space left on device: '/data/a'", SEMLOCK), "disk_full", None, ""),
        (traceback("AssertionError: batch size is not divisible", MEGATRON), "config_error", None, ""),
        (traceback("AssertionError: batch size is not divisible"), "own_exception", None, ""),
        # What was unknown.
        (IN_USE_98.format("[::]:29500") + IN_USE_98.format("0.0.0.0:29500"), "address_in_use", None, "29500"),
        ("".join(SCALES), "nan_loss", "every rank", ""),
        ("".join(SCALES) + TRAINING, HEALTHY, None, ""),
        (
            "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: unknown error\n",
            "cuda_kernel_error",
            None,
            "",
        ),
        (
            "n1:3:3 [4] net_ib.cc:12 NCCL WARN NET/IB : Got completion from peer 10.0.0.3<5> with error 12, opcode 0\n",
            "peer_lost",
            None,
            "10.0.0.3",
        ),
        ("[rank1]: Parameter indices which did not receive grad for rank 1: 4 5 6\n", "unused_parameters", 1, "4 5 6"),
        (
            TRAINING + "Error during training: CUDA out of memory. Tried to allocate 2 GiB\nTraining complete!\n",
            "out_of_memory_cuda",
            None,
            "",
        ),
        (TRAINING + OWN + "\nwriting the log\nJob completed.\n", "own_exception", None, ""),
        (TRAINING + OWN + "\n" + TRAINING + "Job completed.\n", HEALTHY, None, ""),
        (TRAINING + "trainer-1 exited with code 1\n", "summary_only", None, "code 1"),
        (TRAINING + "The replica worker 0 exited with a non-zero status of 1.\n", "summary_only", None, "status of 1"),
        ('level=info msg="pod trainer-0 terminated" exitCode=1\n', "summary_only", None, "exitCode=1"),
        # What the line says.
        (
            "RuntimeError: [Rank 0]: Ranks 4, 5, 7 failed to pass monitoredBarrier in 2000 ms\n",
            "skipped_collective",
            (4, 5, 7),
            "2000 ms",
        ),
        (
            "".join(
                f"[E ProcessGroupGloo.cpp:9] [Rank 0]: Rank {r} failed to pass monitoredBarrier in 9 ms\n"
                for r in (1, 3)
            ),
            "skipped_collective",
            (1, 3),
            "",
        ),
        (
            SIZES.format(1, 610, "COALESCED", 56320) + SIZES.format(7, 610, "COALESCED", 107520),
            "collective_mismatch",
            None,
            "NumelIn=56320",
        ),
        (
            SIZES.format(0, 9, "BROADCAST", 4) + SIZES.format(1, 9, "ALLREDUCE", 4),
            "collective_mismatch",
            None,
            "OpType=BROADCAST",
        ),
        (
            SIZES.format(1, 610, "ALLREDUCE", 56320) + SIZES.format(7, 610, "ALLREDUCE", 56320),
            "collective_timeout",
            None,
            "600000",
        ),
        (SIZES.format(1, 610, "SEND", 5) + SIZES.format(7, 610, "SEND", 6), "collective_timeout", None, ""),
        ("srun: error: Node failure on node3\n", "node_lost", None, "node3"),
        (
            "Cuda failure 217 'peer access is not supported between these two devices'\n"
            + "ncclUnhandledCudaError: Call failed\n",
            "nccl_cuda_error",
            None,
            "217",
        ),
        # What is shown of a long line.
        (
            "Epoch 0:   0%|" + " " * 300 + "| 0/500 [00:00<?, ?it/s]" + SIZES.format(1, 6, "ALLREDUCE", 512),
            "collective_timeout",
            None,
            "Timeout(ms)=600000",
        ),
        (
            "x" * 300 + " " + "y " * 90 + "CUDA out of memory. Tried to allocate 2 GiB (Error)\n",
            "out_of_memory_cuda",
            None,
            "2 GiB",
        ),
    ],
    ids=lambda each: each[-30:] if isinstance(each, str) else "",
)
def test_what_a_line_says_is_used(text: str, name: str, rank: Culprit, shown: str) -> None:
    found = diagnose(text)
    assert (found.name, found.rank) == (name, rank), str(found)
    assert shown in str(found) and len(found.sentence) <= 200


def test_the_host_that_is_lost_is_not_the_one_that_reports_it() -> None:
    said = "W0506 The node '{}' has failed to send a keep-alive heartbeat to the rendezvous '1' due to an error of type {}.\n"
    found = diagnose(said.format("node07_9_0", "RendezvousConnectionError"))
    assert found.name == "node_lost" and found.sentence.startswith("node07_9_0 only reports it")
    assert diagnose("srun: error: Node failure on node3\n").sentence == "node3 was lost."


# Several launches in one file.


@pytest.mark.parametrize(
    ("text", "name", "earlier"),
    [
        (OMP.format(1) + IN_USE + OMP.format(5) + LATE, "collective_timeout", "address_in_use"),
        (
            f"$ torchrun a.py\n{IN_USE}$ CUDA_LAUNCH_BLOCKING=1 torchrun a.py\n{LATE}",
            "collective_timeout",
            "address_in_use",
        ),
        (
            f"you@node1:~/a$ python a.py\n{STOPPED}you@node1:~/a$ python a.py\n{KEYS}",
            "checkpoint_keys",
            "ended_from_outside",
        ),
        (f"seed 1\nreading a\n{STOPPED}seed 2\nreading a\n{KEYS}", "checkpoint_keys", "ended_from_outside"),
        (f"seed 1\nreading a\n{KEYS}seed 1\nreading a\nepoch 1 step 1 loss 2\n", HEALTHY, "checkpoint_keys"),
        # The other host of the same launch, and a rank that is slower.
        (OMP.format(5) + "12:06:00 " + IN_USE + OMP.format(4) + LATE, "address_in_use", ""),
    ],
)
def test_of_several_launches_the_last_is_judged_and_the_others_are_mentioned(
    text: str, name: str, earlier: str
) -> None:
    found = diagnose(text)
    assert found.name == name, str(found)
    assert found.sentence.partition("An earlier launch failed as well: ")[2].partition(",")[0] == earlier


# Harmless lines.


@pytest.mark.parametrize(
    "line",
    [
        "W0301 torch/distributed/run.py:774] Setting OMP_NUM_THREADS environment variable for each process to be 1",
        "[rank0]:[W301 12:00:00.5 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed",
        "/env/lib/python3.11/site-packages/timm/models.py:41: FutureWarning: torch.cuda.amp.autocast(args...) is deprecated",
        "node1:41:41 [0] NCCL INFO NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file: No such file",
        "node1:41:41 [0] NCCL INFO cudaDriverVersion 12020, errors will be reported",
        "Exception ignored in: <function DataLoaderIter.__del__ at 0x7f>\nAssertionError: can only test a child process",
        "Exception ignored in: <_io.TextIOWrapper name='<stdout>' mode='w'>\nBrokenPipeError: [Errno 32] Broken pipe",
        "[W socket.cpp:436] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - Address family).",
        "[W301 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=4): failed to recv, got 0 bytes",
        "wandb: ERROR Error while calling W&B API: 502 bad gateway, retrying",
        "[INFO] [loss_scaler.py:190] Overflow detected. Skipping step. Attempted loss scale: 65536, reducing to 32768",
        "UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 11040).",
        "epoch 3: grad_norm inf, loss scale 32768",
        "config: {'on_error': 'CUDA out of memory', 'retry': 3}",
        'Traceback (most recent call last):\n  File "/a.py", line 1, in f\nConnectionError: hub is away, trying again',
    ],
)
def test_a_harmless_line_raises_no_alarm(line: str) -> None:
    later = "".join(f"epoch 2 step {i} loss 0.{900 - i} lr 3e-4\n" for i in range(40))
    found = diagnose(f"{TRAINING}{line}\n{later}Training finished after 2 epochs\n")
    assert (found.name, found.evidence) == (HEALTHY, ()), str(found)


def test_a_loss_that_stays_nan_to_the_end_is_a_failure_and_one_skipped_step_is_none() -> None:
    lines = TRAINING.splitlines()
    assert diagnose("\n".join([*lines[:20], "step 20 loss: nan", *lines[20:], *lines])).name == HEALTHY
    found = diagnose("\n".join([*lines, *(f"step {i} loss: nan lr 3e-4" for i in range(40, 80))]))
    assert found.name == "nan_loss"


# Bad input, long input, and the forms of the answer.


def test_what_cannot_be_read_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for asked, sentence in [
        ("nowhere.log", "diagnose: nowhere.log is not there: no file, folder or pattern of that name."),
        (str(tmp_path / "empty"), "is a folder without logs"),
    ]:
        with pytest.raises(LogError, match=sentence):
            diagnose(asked)
        ran = ddpkit_diagnose(asked)
        assert ran.returncode == 2 and sentence.encode() in ran.stderr and ran.stdout == b""
    with pytest.raises(LogError, match="nothing was named"):
        diagnose()
    (tmp_path / "nothing.log").touch()
    assert diagnose(tmp_path / "nothing.log").name == UNKNOWN


def test_a_log_that_may_not_be_read_is_told_in_one_sentence(tmp_path: Path) -> None:
    """Root may read everything but what the system itself refuses."""
    with pytest.raises(LogError, match="/proc/self/mem cannot be read: "):
        diagnose("/proc/self/mem")


def test_the_exit_code_and_the_json_say_what_was_found(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.log", tmp_path / "bad.log"
    good.write_text(TRAINING)
    bad.write_text(OWN)
    assert ddpkit_diagnose(str(good)).returncode == 0
    ran = ddpkit_diagnose("--json", str(good), str(bad))
    told = json.loads(ran.stdout)
    assert (ran.returncode, told["name"], told["evidence"][0]["file"], told["evidence"][0]["line"]) == (
        1,
        "own_exception",
        str(bad),
        6,
    )
    assert set(told) == {"name", "title", "sentence", "rank", "evidence", "consequences", "confidence", "collect"}
    html = diagnose(bad)._repr_html_()
    assert "own_exception" in html and "<script" not in diagnose("<script>\nValueError: <script>\n")._repr_html_()


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("loading the next shard\nall 40 steps done\n", 0),
        ("loading the next shard\njob 17 exited with exit code 0\n", 0),
        ("[rank0]: the flux capacitor failed to charge\n", 3),
        ("segment lost: fatal\n", 3),
        ("".join(f"shard {i} is open\n" for i in range(80)), 3),
    ],
)
def test_only_a_good_end_is_healthy(end: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(TRAINING + end)
    ran = ddpkit_diagnose(str(tmp_path / "train.log"))
    assert ran.returncode == code, ran.stdout
    assert (b"No known failure found" in ran.stdout) == (b"exit code, its last lines" in ran.stdout) == (code == 3)


def test_a_log_is_read_in_pieces_that_end_with_a_line(tmp_path: Path) -> None:
    log = tmp_path / "long.log"
    log.write_text(TRAINING * 3000 + OWN + "\n")
    pieces = list(chunks(sources([log])[0]))
    assert len(pieces) > 3 and all(piece.endswith(b"\n") for piece in pieces)
    assert b"".join(pieces) == log.read_bytes()
    assert diagnose(log).evidence[0].line == 40 * 3000 + 6


def test_a_line_without_an_end_is_cut_and_read() -> None:
    source = Source("endless", data=b"x" * 5_000_000 + b"\nValueError: boom\n")
    assert max(map(len, chunks(source))) < 3_000_000
    assert diagnose("x" * 5_000_000 + "\nValueError: boom\n").name == "own_exception"


def test_a_million_lines_alike_cost_no_memory(tmp_path: Path) -> None:
    log = tmp_path / "dense.log"
    dice = random.Random(0)
    with log.open("w") as file:
        for i in range(200_000):
            file.write(f"[rank{i % 8}]: ERROR: sample {dice.getrandbits(64):x} timed out, trying again\n")
        file.write(OWN + "\n")
    status = "open('/proc/self/status').read().partition('VmHWM:')[2].split()[0]"
    command = f"import ddpkit; print(ddpkit.diagnose({str(log)!r}).name, {status})"
    ran = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120, check=True)
    name, kibibytes = ran.stdout.split()
    assert name == "own_exception" and int(kibibytes) < 100_000


def test_a_log_that_tells_of_failures_all_along_is_judged_by_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after each of them can all be read that follows: what comes much later shows that the job went on."""
    monkeypatch.setattr("ddpkit.diagnosis.log.scan.MOST_AFTERMATH", 500)
    dice = random.Random(0)
    noise = []
    for step in range(4000):
        odd = "".join(dice.choices("ghijklmnop", k=8))
        noise.append(f"epoch 1 step {step} loss 0.5\nValueError: {odd}\nworker {odd} exited with exit code 1\n")
    calm = "".join(f"epoch 2 step {step} loss 0.5\n" for step in range(40)) + "Training finished\n"
    assert diagnose("".join(noise) + calm).name == HEALTHY
    found = diagnose("".join(noise) + calm.replace("Training finished\n", "") + OWN + "\n")
    assert found.name == "own_exception" and found.evidence[0].text == "KeyError: 'image'"


def test_the_rank_that_says_it_is_not_the_rank_that_is_missing() -> None:
    assert {p.name for p in pages()} >= OF_ANOTHER
    found = diagnose("RuntimeError: [Rank 0]: Ranks 5 failed to pass monitoredBarrier in 3000 ms\n")
    assert (found.name, found.rank) == ("skipped_collective", 5)


def test_the_readme_shows_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECORDED.parents[1])
    _, _, shown = Path("README.md").read_text().partition("$ ddpkit diagnose ")
    log, _, rest = shown.partition("\n")
    assert str(diagnose(log)) == rest.partition("\n```")[0]


def test_what_is_shown_fits_a_terminal() -> None:
    text = str(diagnose(interleaved(teed)))
    assert text.splitlines()[0] == "own_exception (certain): An exception ended a rank"
    assert os.linesep not in text.splitlines()[-1] and text.splitlines()[-1].endswith("ddpkit explain own_exception")


@pytest.mark.parametrize(("part", "right"), [("first", 34), ("second", 27)])
def test_as_many_public_excerpts_are_right_as_docs_say(part: str, right: int) -> None:
    """Excerpts from public threads; what they tell was noted before ddpkit read them. The second forty changed no signature."""
    folder = Path(__file__).parent / "public" / part
    found = 0
    for row in tomllib.loads((folder / "truth.toml").read_text())["log"]:
        said = diagnose(folder / row["file"])
        if row["state"] == "healthy":
            assert said.name in (HEALTHY, UNKNOWN), f"{row['file']}: an alarm, {said.name}"
            found += said.name == HEALTHY
            continue
        assert said.name != HEALTHY, row["file"]
        ranks = [said.rank] if isinstance(said.rank, int) else sorted(said.rank or ())
        found += said.name in (row["page"] or [UNKNOWN]) and ranks in ([], sorted(row["ranks"]))
    assert found >= right
