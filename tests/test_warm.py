"""Warm start: the same job as a cold one, whatever a program may look at, and no process left whoever is killed."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import BLOCKED, process_of, wait_for, wait_for_line

import ddpkit
from ddpkit.launcher.magic import torchrun
from ddpkit.processes import zygote
from ddpkit.processes.forked_client import Connection
from ddpkit.runfolder import wire

PACKAGE = Path(ddpkit.__file__).parent

pytestmark = pytest.mark.job

# What a script does, and so what both of its runs must have in common: all that they print, and how each rank ended.
LOOKS = {
    "arguments": "import sys; print(sys.argv, sys.orig_argv[-3:], sys.flags)",
    "import path": "import sys; print(sys.path)",
    "main module": "print(__name__, __file__, __spec__, __package__, __builtins__.__name__)",
    "environment": """
        import os
        varies = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "MASTER_PORT", "DDPKIT_RUN")
        print(sorted((k, v if k not in varies else "...") for k, v in os.environ.items()))
        """,
    "parent": """
        import os, psutil
        print("torch.distributed.run" in psutil.Process(os.getppid()).cmdline())
        rank = os.getpid()
        if not (child := os.fork()):
            os._exit(os.getppid() != rank)
        print("its child's exit code:", os.waitpid(child, 0)[1])
        """,
    "environment read by the system": """
        entries = open("/proc/self/environ", errors="replace").read().split("\\0")
        print(sorted(e for e in entries if e.startswith(("RANK=", "WORLD_SIZE="))))
        """,
    "working directory, mask, limits": """
        import os, resource
        print(os.getcwd(), oct(os.umask(0)), os.sched_getaffinity(0), os.nice(0))
        print([resource.getrlimit(i) for i in range(16)])
        """,
    "standard streams": """
        import os, sys
        for s in (sys.stdin, sys.stdout, sys.stderr):
            print(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.isatty())
        print(sys.stdout.write_through, repr(sys.stdin.read()), sorted(map(int, os.listdir("/proc/self/fd")))[:3])
        print("to stderr", file=sys.stderr); os.write(1, b"raw\\n")
        """,
    "threads and debug level": """
        import torch, torch.distributed as dist, threading, os
        print(torch.get_num_threads(), torch.get_num_interop_threads(), dist.get_debug_level())
        print(threading.main_thread() is threading.current_thread(), threading.get_native_id() == os.getpid())
        print(threading.main_thread().native_id == os.getpid(), threading.active_count())
        """,
    "threads of numpy": """
        import numpy, threadpoolctl
        print([i["num_threads"] for i in threadpoolctl.threadpool_info() if i["user_api"] == "blas"])
        """,
    "signals": """
        import signal
        print([(s.name, str(signal.getsignal(s))) for s in signal.Signals if s.name not in ("SIGRTMIN", "SIGRTMAX")])
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        """,
    "pickling from main": """
        import pickle
        class Batch:
            pass
        print(pickle.loads(pickle.dumps(Batch())).__class__ is Batch)
        """,
    "sibling import": "import beside; print(beside.__file__)",
    "exit functions": """
        import atexit
        atexit.register(print, "exit function ran")
        print("end")
        """,
    "threads are joined": """
        import threading, time
        threading.Thread(target=lambda: (time.sleep(0.3), print("thread done"))).start()
        """,
    "warnings": """
        import warnings, torch
        warnings.warn("shown once")
        torch.tensor([1.0], requires_grad=True).grad_fn
        torch.nn.functional.softmax(torch.ones(2))
        """,
    "record": """
        import json, os
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            raise ValueError("recorded")
        try:
            main()
        except ValueError:
            print(json.load(open(os.environ["TORCHELASTIC_ERROR_FILE"]))["message"]["message"])
            raise
        """,
    "exception": "def deep():\n    raise KeyError('x')\n\ndeep()",
    "exception group and cause": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('two') from e",
    "exit code": "import sys; sys.exit(7)",
    "exit text": "import sys; sys.exit('no data')",
    "exit code without clean-up": "import os; os._exit(9)",
    "interrupt": "raise KeyboardInterrupt",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated by itself": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
    "memory limit": """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
        files = [open("/dev/null") for _ in range(30)]
        """,
    "crash dump to stderr": """
        import faulthandler, os, signal, sys
        faulthandler.enable()
        faulthandler.dump_traceback(file=sys.stderr)
        """,
    "subprocess": """
        import subprocess, sys
        if __name__ == "__main__":
            print(subprocess.run([sys.executable, "-c", "import os, sys; print(sys.path, os.environ['RANK'])"],
                  capture_output=True, text=True).stdout)
        """,
    "children": """
        import multiprocessing as mp, os, sys
        def work(q):
            q.put((os.getcwd(), __name__ in ("__main__", "__mp_main__"), mp.parent_process() is not None))
        if __name__ == "__main__":
            for how in ("fork", "spawn", "forkserver"):
                context = mp.get_context(how)
                q = context.Queue()
                child = context.Process(target=work, args=(q,))
                child.start()
                print(how, q.get(timeout=60))
                child.join()
                print(child.exitcode)
        """,
    "loader workers": """
        class Ten:
            def __len__(self): return 10
            def __getitem__(self, i): return i, torch_data().get_worker_info().num_workers
        def torch_data():  # imported where it is used: the children above have no need of it
            import torch.utils.data
            return torch.utils.data
        if __name__ == "__main__":
            import torch
            for how, workers in (("fork", 2), ("spawn", 1)):
                torch.manual_seed(0)
                options = {"num_workers": workers, "multiprocessing_context": how}
                loader = torch_data().DataLoader(Ten(), batch_size=5, shuffle=True, **options)
                print(how, [[t.tolist() for t in batch] for batch in loader])
        """,
    "a dead loader worker": """
        import os, signal
        class Deadly:
            def __len__(self): return 4
            def __getitem__(self, i): os.kill(os.getpid(), signal.SIGKILL)
        if __name__ == "__main__":
            from torch.utils.data import DataLoader
            try:
                list(DataLoader(Deadly(), num_workers=1))
            except RuntimeError as error:
                print(str(error).partition("(pid")[0], "exited unexpectedly" in str(error))
        """,
    "DDP and flight recorder": """
        import pickle, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        dist.init_process_group("gloo")
        torch.manual_seed(dist.get_rank())
        net = DDP(torch.nn.Linear(4, 2))
        net(torch.ones(3, 4)).sum().backward()
        print([p.grad.tolist() for p in net.parameters()], net.module.weight.tolist())
        entries = pickle.loads(torch._C._distributed_c10d._dump_fr_trace()).get("entries", [])
        print([e["profiling_name"] for e in entries])
        dist.destroy_process_group()
        """,
}
# Looks that leave a process as it was share a program: a cold start takes twenty times as long as a warm one.
ITSELF = (
    "arguments", "import path", "main module", "environment", "parent", "environment read by the system", "standard streams",
    "working directory, mask, limits", "signals", "pickling from main", "sibling import",
)  # fmt: skip
THREADS = ("threads of numpy", "threads and debug level", "warnings")
STARTED = ("subprocess", "children", "loader workers", "a dead loader worker")
AT_EXIT = ("crash dump to stderr", "exit functions", "threads are joined")
ENDS = tuple(look for look in LOOKS if look not in {*ITSELF, *THREADS, *STARTED, *AT_EXIT})
# An end much like another one; `make soak` has these.
ALIKE = (
    "exception group and cause", "exit text", "exit code without clean-up", "terminated by itself", "abort", "memory limit",
)  # fmt: skip
# Where more than one rank makes a difference.
TWO_RANKS = ("exception", "exit code", "killed", "interrupt", "DDP and flight recorder")
VARIABLES = {
    "OPENBLAS_NUM_THREADS": "2",
    "TORCH_DISTRIBUTED_DEBUG": "INFO",
    "TORCH_FR_BUFFER_SIZE": "10",
    "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:/srv/one:relative",
    "TZ": "Asia/Tokyo",
    "MY_FLAG": "ä \udcff",
}
# By name what a program looks at, and how it is launched.
PROGRAMS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "itself": (ITSELF, {"nproc": 2}),
    "threads": (THREADS, {"nproc": 2}),
    "one rank has every core": (THREADS, {"nproc": 1}),
    "OMP_NUM_THREADS": (THREADS, {"nproc": 2, "env": {"OMP_NUM_THREADS": "3"}}),
    "other variables and arguments": (
        (*ITSELF, *THREADS, "DDP and flight recorder"),
        {"nproc": 1, "env": VARIABLES, "args": ["--name", "a b", "", "ü"]},
    ),
    "what it starts": (STARTED, {"nproc": 1}),
    "at its exit": (AT_EXIT, {"nproc": 1}),
    **{end: ((end,), {"nproc": 2 if end in TWO_RANKS else 1}) for end in ENDS},
}


def both_ways(path: str, **options: Any) -> tuple[ddpkit.Run, ddpkit.Run]:
    """The same launch, cold and warm."""
    cold = ddpkit.launch(path, **{"show": False, "timeout": 120, **options, "warm": False})
    warm = ddpkit.launch(path, **{"show": False, "timeout": 120, **options})
    assert cold.started == "started cold: warm=False"
    assert warm.warm, warm.started
    assert warm.command == cold.command
    assert "-P -m torch.distributed.run --standalone --nproc-per-node" in warm.command
    return cold, warm


def seen(run: ddpkit.Run) -> list[tuple[Any, ...]]:
    """What two runs of one script must have in common."""
    ranks = [
        (
            r.exitcode,
            r.signal,
            r.stdout,
            without_addresses(r.stderr),
            r.failure and (r.failure.type, r.failure.line_text),
        )
        for r in run.ranks
    ]
    return [(run.state, str(run)), *ranks]


def without_addresses(text: str) -> str:
    """`text` without memory addresses, pids and process-specific lines of torch's own logging."""
    text = re.sub(r"\[rank\d\]:|0x[0-9a-f]+|\bpid[ =]\d+|Thread \S+", "...", text)
    text = re.sub(r"\d{4} \d\d:\d\d:\d\d\.\d+( \d+)?", "...", text)
    # A warm rank has more of ddpkit's own frames below the script's first.
    return re.sub(rf'( *File "{re.escape(str(PACKAGE))}/.*\n)+', "(ddpkit)\n", text)


@pytest.mark.parametrize(
    "program", [pytest.param(each, marks=[pytest.mark.soak] if each in ALIKE else []) for each in PROGRAMS]
)
def test_a_warm_job_is_the_same_job(script: Callable[..., str], home: Path, program: str) -> None:
    looks, options = PROGRAMS[program]
    (home / "beside.py").write_text("")
    cold, warm = both_ways(script("\n".join(textwrap.dedent(LOOKS[look]) for look in looks)), **options)
    assert seen(warm) == seen(cold)
    assert cold.ok or len(looks) == 1, str(cold)


SEEDS = """
import json, multiprocessing, os, random, secrets, tempfile, uuid, numpy, torch
print(json.dumps({
    "random": random.random(), "numpy": numpy.random.rand(), "numpy's generator": numpy.random.default_rng().random(),
    "torch": torch.rand(1).item(), "torch's seed": torch.initial_seed(), "uuid": str(uuid.uuid4()),
    "secrets": secrets.token_hex(), "authkey": multiprocessing.current_process().authkey.hex(),
    "temporary name": os.path.basename(tempfile.mktemp()), "process": os.getpid(),
}))
"""


def test_no_two_ranks_share_a_seed(script: Callable[..., str], warm_process: None) -> None:
    path = script(SEEDS)
    runs = [ddpkit.launch(path, show=False, timeout=120) for _ in range(2)]
    assert [r.warm for r in runs] == [True, True]
    drawn = [json.loads(rank.stdout) for run in runs for rank in run.ranks]
    for name in drawn[0]:
        assert len({d[name] for d in drawn}) == 4, f"{name} is the same twice"


def test_a_module_is_run_as_with_python_m(home: Path) -> None:
    package = home / "course"
    package.mkdir()
    (package / "__init__.py").write_text("print('package', __name__)\n")
    (package / "train.py").write_text(
        "import sys\nfrom . import part\nprint(__name__, __package__, __spec__.name, sys.argv, sys.path[0], part.__file__)\n"
    )
    (package / "part.py").write_text("")
    cold, warm = both_ways("course.train", args=["--epochs", "2"])
    assert cold.ok
    assert seen(warm) == seen(cold)


def test_a_function_is_run_warm(home: Path) -> None:
    def square(x: int) -> int:
        return x * x

    run = ddpkit.launch(square, args=(7,), show=False, timeout=120)
    assert run.warm
    assert run.returned == {0: 49, 1: 49}


def test_restarts_are_warm_too(script: Callable[..., str]) -> None:
    path = script(
        """
        import os, sys
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
        sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
        """
    )
    cold, warm = both_ways(path, max_restarts=1, nproc=1)
    assert warm.ok
    assert all(rank.warm for attempt in warm.attempts for rank in attempt)
    assert [[r.stdout for r in a] for a in warm.attempts] == [[r.stdout for r in a] for a in cold.attempts]


# When a launch is cold, and says so.


def launch(path: str, **options: Any) -> ddpkit.Run:
    return ddpkit.launch(path, **{"show": False, "timeout": 120, **options})


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"TORCH_CPP_LOG_LEVEL": "INFO"}, "TORCH_CPP_LOG_LEVEL is read when Python and torch start"),
        pytest.param(
            *({"PYTHONHASHSEED": "7"}, "PYTHONHASHSEED is read when Python and torch start"), marks=pytest.mark.soak
        ),
        pytest.param(*({"LD_PRELOAD": ""}, "LD_PRELOAD is read when Python and torch start"), marks=pytest.mark.soak),
        ({"OMP_NUM_THREADS": "2,1"}, "OMP_NUM_THREADS=2,1 is read when torch starts"),
    ],
)
def test_a_variable_that_comes_too_late_makes_the_launch_cold(
    script: Callable[..., str], env: dict[str, str], reason: str
) -> None:
    name = next(iter(env))
    run = launch(script(f"import os; print(os.environ['{name}'])"), env=env, nproc=1)
    assert run.ok, str(run)
    assert run.started == f"started cold: {reason}"
    assert run.ranks[0].stdout.strip() == env[name]


def test_a_kernel_in_which_an_optimizer_stepped_launches_warm(
    script: Callable[..., str], warm_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch then sets a variable of its own in the kernel's environment."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/inductor")
    run = launch(script("import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"))
    assert run.warm and run.ranks[0].stdout.strip() == "/tmp/inductor", run.started


IN_A_SET = """
import os
print(list({f"metric {i}" for i in range(50)}), file=open(f"order_{os.environ['RANK']}", "w"))
"""


def test_a_program_that_goes_through_a_set_is_cold_and_its_ranks_do_so_in_orders_of_their_own(
    script: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = launch(script(IN_A_SET), nproc=2)
    assert run.ok, str(run)
    assert run.cold_because == "it iterates over a set or calls hash(), and forked ranks would all use the same order"
    assert (tmp_path / "order_0").read_text() != (tmp_path / "order_1").read_text()


SETS = """
import os
os.environ["{name}"] = "2"
import torch
print(torch.get_num_threads())
"""


@pytest.mark.parametrize(
    "name",
    ["TORCH_LOGS", *(pytest.param(n, marks=pytest.mark.soak) for n in ("OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF"))],
)
def test_a_program_that_sets_a_variable_before_it_imports_torch_is_cold(script: Callable[..., str], name: str) -> None:
    run = launch(script(SETS.format(name=name)), env={"TORCH_LOGS": None}, nproc=1)
    assert run.cold_because == f"the program names {name}, which is read when torch is imported"


def test_a_function_that_does_so_is_cold_too(home: Path) -> None:
    def train() -> int:
        os.environ["OMP_NUM_THREADS"] = "2"
        import torch

        return torch.get_num_threads()

    run = launch(train, nproc=1)
    assert run.cold_because == "the program names OMP_NUM_THREADS, which is read when torch is imported"
    assert set(run.returned.values()) == {min(2, os.cpu_count() or 1)}


@pytest.mark.parametrize(
    "line", ["print(os.environ['TORCHELASTIC_RUN_ID'])", "os.environ['CUDA_VISIBLE_DEVICES'] = '0'"]
)
def test_a_program_that_names_what_is_read_later_is_warm(script: Callable[..., str], line: str) -> None:
    assert launch(script(f"import os\n{line}\n")).warm


def test_what_the_kernel_has_changed_since_is_inherited(script: Callable[..., str], warm_process: None) -> None:
    path = script(textwrap.dedent(LOOKS["working directory, mask, limits"]))
    limits, cores, mask = resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0), os.umask(0o077)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
        os.sched_setaffinity(0, {min(cores)})
        cold, warm = both_ways(path)
    finally:
        os.umask(mask)
        os.sched_setaffinity(0, cores)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "0o77" in cold.ranks[0].stdout and "(512," in cold.ranks[0].stdout
    assert seen(warm) == seen(cold)


def test_a_file_that_shadows_a_loaded_module_makes_the_launch_cold(script: Callable[..., str], home: Path) -> None:
    path = script("import sympy; print(sympy.__file__)")
    (home / "sympy.py").write_text("")
    run = launch(path, nproc=1)
    assert run.cold_because == f"{home} has a module sympy, which would take the place of one that is loaded already"
    assert run.ranks[0].stdout.strip() == str(home / "sympy.py")


def test_a_cell_that_bears_the_name_of_a_module_does_not_take_its_place(home: Path) -> None:
    bound: dict[str, Any] = {}
    torchrun("--as random --quiet --timeout 120", "import random; print(random.randint(1, 1))", bound)
    assert bound["random"].ok, str(bound["random"])
    assert bound["random"].warm, bound["random"].started
    torchrun(
        "--nproc-per-node 1 --as random --quiet --timeout 120 --no-warm",
        "import random; print(random.randint(1, 1))",
        bound,
    )
    assert bound["random"].started == "started cold: warm=False"


def test_warm_start_can_be_turned_off_for_all(script: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPKIT_WARM", "0")
    run = launch(script("print('hello')"), nproc=1)
    assert (run.ok, run.warm, run.started) == (True, False, "started cold: DDPKIT_WARM=0")
    assert ddpkit.Run.from_folder(run.folder).started == "started cold: DDPKIT_WARM=0"


def test_newly_installed_packages_bring_a_new_zygote(home: Path) -> None:
    # In a folder of packages that only this kernel has: other tests' zygotes run from the environment's own.
    (home / "hello.py").write_text("print('hello')\n")
    code = """
import ddpkit, os, site
from ddpkit.processes import zygote
def warm_pid():
    while not ddpkit.launch("hello.py", nproc=1, show=False, timeout=120).warm:
        pass
    return zygote._current.pid
packages = site.getusersitepackages()
os.makedirs(packages)
before = warm_pid()
unchanged = warm_pid()
os.mkdir(os.path.join(packages, "installed"))
print(before == unchanged, before == warm_pid())
"""
    env = {**os.environ, "PYTHONUSERBASE": str(home / "user")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout == "True False\n", done.stderr


def test_a_job_that_does_not_wait_does_not_wait_for_the_zygote(script: Callable[..., str]) -> None:
    zygote.end()
    run = launch(script("print('hello')"), wait=False)
    assert run.cold_because in ("the warm process was not ready yet", "")
    assert run.wait(120).ok


def test_a_zygote_that_cannot_start_is_tried_twice_and_no_more(home: Path) -> None:
    (home / "torch.py").write_text("raise ImportError('broken torch')\n")
    (home / "hello.py").write_text("print('hello')\n")
    code = """
import ddpkit
from ddpkit.processes import zygote
for _ in range(3):
    run = ddpkit.launch("hello.py", show=False, timeout=120)
print(run.cold_because, zygote._failed)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "the warm process cannot be started (ImportError: broken torch) 2\n", done.stderr


# Whoever is killed; `test_failures.py` kills agents and keepers, warm as well.


def warm_and_ready(path: str, **options: Any) -> ddpkit.Run:
    """A warm job that has said "ready". On a full machine a launch that does not wait may come too soon, and is cold."""
    for _ in range(3):
        run = launch(path, wait=False, **options)
        wait_for_line(run, "ready")
        if run.warm:
            break
        run.stop()
    assert run.warm, run.started
    return run


@pytest.fixture
def blocked(script: Callable[..., str], warm_process: None) -> ddpkit.Run:
    """A warm job that hangs in a collective."""
    return warm_and_ready(script(BLOCKED))


def test_a_killed_client_ends_its_rank_and_the_job(blocked: ddpkit.Run) -> None:
    process_of(blocked, wire.CLIENT).kill()
    assert blocked.wait(30).state == "failed"
    assert blocked.culprit is None or isinstance(blocked.culprit, int)


def test_a_killed_rank_is_named(blocked: ddpkit.Run) -> None:
    os.kill(blocked.ranks[1].pid or 0, signal.SIGKILL)
    assert blocked.wait(30).state == "failed"
    assert (blocked.culprit, blocked.ranks[1].signal) == (1, "SIGKILL")


def test_a_killed_zygote_leaves_running_jobs_alone_and_is_started_anew(
    blocked: ddpkit.Run, script: Callable[..., str]
) -> None:
    killed = zygote._current
    assert killed is not None
    os.kill(killed.pid, signal.SIGKILL)
    wait_for(lambda: not killed.alive())
    assert launch(script("print('hello')", "hello.py")).warm
    assert zygote._current is not killed
    assert blocked.state == "running"
    assert blocked.stop().state == "stopped"


def test_ranks_start_cold_where_the_zygote_has_died_since(
    script: Callable[..., str], home: Path, warm_process: None
) -> None:
    path = script(
        """
        import os, sys, time
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            print("ready", flush=True)
            while not os.path.exists("go"):
                time.sleep(0.05)
            sys.exit(3)
        """
    )
    run = warm_and_ready(path, max_restarts=1)
    assert zygote._current is not None
    os.kill(zygote._current.pid, signal.SIGKILL)
    (home / "go").write_text("")
    assert run.wait(60).ok, str(run)
    assert all(r.warm for r in run.attempts[0])
    assert run.started == "started cold: rank 0 could not be forked from the warm process"


# The zygote itself.


def in_a_kernel(code: str, **env: str) -> subprocess.Popen[str]:
    """A process that launches a job of its own, prints what `code` says and then waits for its stdin to close."""
    start = "import ddpkit, os, sys\nfrom ddpkit.processes import zygote\n"
    code = f"{start}{textwrap.dedent(code)}\nsys.stdout.flush()\nsys.stdin.read()"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def gone_within(pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


LAUNCH = """
run = ddpkit.launch("hello.py", show=False, timeout=120)
print(run.warm, zygote._current.pid, zygote._current.folder)
"""
FROM_A_THREAD = f"""
import threading
def click():
    {"    ".join(LAUNCH.strip().splitlines(keepends=True))}
button = threading.Thread(target=click)
button.start()
button.join()
"""


@pytest.mark.parametrize("code", [LAUNCH, FROM_A_THREAD], ids=["from the main thread", "from a thread that ends"])
def test_the_zygote_dies_with_its_kernel_and_not_before(script: Callable[..., str], code: str) -> None:
    script("print('hello')", "hello.py")
    with in_a_kernel(code) as kernel:
        assert kernel.stdout is not None
        warm, pid, folder = kernel.stdout.readline().split()
        assert warm == "True"
        assert not gone_within(int(pid), 1.5)
        kernel.kill()
        kernel.wait()
    assert gone_within(int(pid), 10)
    assert not Path(folder).exists()


def test_signals_that_a_shell_has_ignored_reach_warm_ranks_as_cold_ones(script: Callable[..., str]) -> None:
    """`&` in a script has SIGINT and SIGQUIT ignored, `nohup` SIGHUP; torchrun's ranks have them by default all the same."""
    text = "import signal\nfor s in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP): print(repr(signal.getsignal(s)))\n"
    script(text, "hello.py")
    code = """
    import signal
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    runs = [ddpkit.launch("hello.py", show=False, warm=warm, timeout=120) for warm in (True, False)]
    print([run.warm for run in runs], runs[0].ranks[0].stdout == runs[1].ranks[0].stdout, "IGN" in runs[0].ranks[0].stdout)
    """
    with in_a_kernel(code) as kernel:
        assert kernel.stdout is not None and kernel.stdin is not None
        assert kernel.stdout.readline() == "[True, False] True False\n"
        kernel.stdin.close()


def test_a_process_that_ends_takes_its_zygote_along_at_once(script: Callable[..., str]) -> None:
    script("print('hello')", "hello.py")
    with in_a_kernel(LAUNCH) as kernel:
        assert kernel.stdout is not None and kernel.stdin is not None
        pid = int(kernel.stdout.readline().split()[1])
        kernel.stdin.close()
        kernel.wait(30)
        assert not psutil.pid_exists(pid)


def test_an_idle_zygote_ends_and_the_next_launch_starts_another(script: Callable[..., str]) -> None:
    script("print('hello')", "hello.py")
    code = LAUNCH + "zygote._current._process.wait()\n" + LAUNCH
    with in_a_kernel(code, DDPKIT_WARM_IDLE_S="1") as kernel:
        assert kernel.stdout is not None
        first, second = (kernel.stdout.readline().split() for _ in range(2))
        assert (first[0], second[0]) == ("True", "True")
        assert first[1] != second[1]
        assert gone_within(int(first[1]), 10)
        kernel.kill()
    assert gone_within(int(second[1]), 10)


def test_the_zygote_keeps_one_thread_and_leaves_cuda_alone(script: Callable[..., str]) -> None:
    assert launch(script("print('hello')")).warm
    assert zygote._current is not None
    process = psutil.Process(zygote._current.pid)
    assert process.num_threads() == 1
    assert not [
        f for f in os.listdir(f"/proc/{process.pid}/fd") if "nvidia" in os.readlink(f"/proc/{process.pid}/fd/{f}")
    ]


def test_nobody_else_is_served(script: Callable[..., str], as_root: bool) -> None:
    assert launch(script("print('hello')")).warm
    assert zygote._current is not None
    path = Path(zygote._current.path)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    if not as_root:
        pytest.skip("only root can ask as somebody else")
    as_nobody = "import os, socket, sys; s = socket.socket(socket.AF_UNIX); os.setgid(65534); os.setuid(65534)\n"
    as_nobody += "try: s.connect(sys.argv[1]); print(s.recv(1))\nexcept OSError as e: print(type(e).__name__)"
    assert said(as_nobody, path) == "PermissionError"
    try:
        path.chmod(0o666)
        path.parent.chmod(0o755)
        assert said(as_nobody, path) == "b''", "the peer's user is looked at as well"
    finally:
        path.chmod(0o600)
        path.parent.chmod(0o700)
    assert launch("train.py").warm


def said(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()


def test_nonsense_and_hangers_on_do_not_stop_the_zygote(script: Callable[..., str]) -> None:
    assert launch(script("print('hello')")).warm
    assert zygote._current is not None
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\1N", b"\0\0\0\5[\0\0\0\0"):
        with socket.socket(socket.AF_UNIX) as nonsense:
            nonsense.connect(zygote._current.path)
            nonsense.sendall(words)
    connection = Connection.to(zygote._current.path)
    connection.close()
    assert launch("train.py").warm


def test_no_descriptor_is_left_open_by_launches(script: Callable[..., str]) -> None:
    path = script("print('hello')")
    assert launch(path).warm

    def held() -> tuple[int, int, int]:
        assert zygote._current is not None
        mine, warm = psutil.Process(), psutil.Process(zygote._current.pid)
        return mine.num_fds(), warm.num_fds(), len(warm.children())

    launch(path)
    before = held()
    for _ in range(20):
        assert launch(path).warm
    assert held()[:2] == before[:2]
    assert wait_for(lambda: held()[2] <= before[2] + 2, seconds=30)


@pytest.mark.parametrize("warm", [True, False])
def test_a_file_of_the_current_folder_does_not_stand_in_torchruns_way(
    home: Path, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    """As with the command `torchrun`: torchrun imports Python's queue, and finds its own."""
    (home / "scripts").mkdir()
    (home / "scripts" / "train.py").write_text("print('trained')\n")
    (home / "queue.py").write_text("raise SystemExit('not the queue that was meant')\n")
    monkeypatch.chdir(home)
    run = launch("scripts/train.py", warm=warm)
    assert run.ok and run.warm == warm, f"{run}\n{run.torchrun_log}"
