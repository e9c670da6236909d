"""Functions as targets: arguments and return values by rank, cell sources in tracebacks, classes for spawned workers."""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ddpkit
from ddpkit.launcher.target import resolve
from ddpkit.runfolder import wire

pytestmark = pytest.mark.job


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Defines names as a notebook cell would: in `__main__`, from a file that exists in linecache only."""
    main = ModuleType("__main__")
    monkeypatch.setitem(__import__("sys").modules, "__main__", main)

    def define(text: str) -> dict[str, Any]:
        text = textwrap.dedent(text).lstrip("\n")
        file = "/tmp/ipykernel_1/123.py"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec"), main.__dict__)
        return main.__dict__

    return define


def test_a_function_may_be_an_argument(home: Path, cell: Callable[[str], dict[str, Any]]) -> None:
    names = cell(
        """
        def double(x):
            return 2 * x
        def train(what, x):
            return what(x)
        """
    )
    run = ddpkit.launch(names["train"], args=(names["double"], 21), show=False, timeout=60)
    assert run.returned == {0: 42, 1: 42}


def test_arguments_go_in_and_values_come_back_by_rank(home: Path, cell: Callable[[str], dict[str, Any]]) -> None:
    names = cell(
        """
        import os
        SCALE = 10
        def helper(x):
            return SCALE * x
        def train(base, *, step, nproc=None):
            return helper(base) + step * int(os.environ["RANK"]), nproc
        """
    )
    run = ddpkit.launch(names["train"], args=(1,), kwargs={"step": 5, "nproc": "mine"}, show=False, timeout=120)
    assert run.ok, str(run)
    assert run.name == "train"
    assert run.returned == {0: (10, "mine"), 1: (15, "mine")}


def test_a_traceback_has_the_cells_source_lines(home: Path, cell: Callable[[str], dict[str, Any]]) -> None:
    names = cell(
        """
        def train():
            x = 1
            raise ValueError("from the cell")  # here
        """
    )
    run = ddpkit.launch(names["train"], show=False, timeout=120)
    assert run.culprit == "every rank"
    assert run.ranks[0].failure.line_text == 'line 3: raise ValueError("from the cell")  # here'
    assert 'raise ValueError("from the cell")  # here' in run.ranks[0].stderr
    assert wire.FUNCTION_SCRIPT not in run.ranks[0].stderr, "ddpkit's own script shows in the user's traceback"


def test_a_crash_in_a_cells_function_names_its_line(home: Path, cell: Callable[[str], dict[str, Any]]) -> None:
    names = cell(
        """
        def train():
            import ctypes
            ctypes.string_at(0)
        """
    )
    run = ddpkit.launch(names["train"], nproc=1, show=False, timeout=120)
    assert run.ranks[0].signal == "SIGSEGV"
    assert run.ranks[0].failure.line_text == "line 3: ctypes.string_at(0)"


@pytest.mark.parametrize("context", ["spawn", "fork", pytest.param("forkserver", marks=pytest.mark.soak)])
def test_classes_of_the_cell_reach_loader_workers(
    home: Path, cell: Callable[[str], dict[str, Any]], context: str
) -> None:
    names = cell(
        """
        from torch.utils.data import DataLoader, Dataset

        class Numbers(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, i):
                return i * factor()

        def factor():
            return 3

        def train(context):
            loader = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=context)
            return [batch.tolist() for batch in loader]
        """
    )
    run = ddpkit.launch(names["train"], args=(context,), show=False, timeout=240)
    assert run.ok, run.ranks[0].stderr
    assert run.returned[1] == [[0, 3], [6, 9]]


def test_a_large_captured_global_is_named(home: Path, cell: Callable[[str], dict[str, Any]]) -> None:
    names = cell(
        """
        data = bytes(20_000_000)
        def train():
            return len(data)
        """
    )
    run = ddpkit.launch(names["train"], nproc=1, show=False, timeout=120)
    assert run.returned == {0: 20_000_000}
    assert run.notes == (
        "train carries 19 MiB to every rank, 19 MiB of it in the global 'data'; load it inside the function, or pass a path.",
    )


def test_a_value_that_cannot_be_pickled_is_the_ranks_own_failure(
    home: Path, cell: Callable[[str], dict[str, Any]]
) -> None:
    names = cell("def train():\n    import threading\n    return threading.Lock()\n")
    run = ddpkit.launch(names["train"], show=False, timeout=120)
    assert run.culprit == "every rank"
    assert "rank 0 returned a lock that cannot be pickled" in run.ranks[0].failure.message


def test_a_function_of_an_importable_module(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "mine").mkdir()
    (home / "mine" / "things.py").write_text("import os\ndef train():\n    return os.environ['RANK']\n")
    monkeypatch.syspath_prepend(str(home / "mine"))
    import things  # type: ignore[import-not-found]

    run = ddpkit.launch(things.train, show=False, timeout=120)
    assert run.returned == {0: "0", 1: "1"}, str(run)


def test_a_module_runs_as_python_dash_m(home: Path) -> None:
    package = home / "src"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text("word = 'found'\n")
    (package / "train.py").write_text(
        "import sys\nfrom src.model import word\nprint(word, __name__, __spec__.name, sys.argv[1:])\n"
    )
    run = ddpkit.launch("src.train", args=["--x"], show=False, timeout=120)
    assert run.ranks[0].stdout == "found __main__ src.train ['--x']\n", str(run)


def test_a_script_runs_untouched(home: Path) -> None:
    (home / "sub").mkdir()
    (home / "sub" / "sibling.py").write_text("word = 'beside the script'\n")
    (home / "sub" / "train.py").write_text(
        "import os, sys, sibling, pickle\n"
        "class Mine: pass\n"
        "assert pickle.loads(pickle.dumps(Mine())).__class__ is Mine\n"
        "print(sibling.word, __name__, __spec__, sys.argv, os.getcwd() == sys.argv[1], sys.stdin.read() == '')\n"
        "import psutil; assert 'torch.distributed.run' in psutil.Process(os.getppid()).cmdline()\n"
        "assert 'PYTHON_EXEC' not in os.environ and not [k for k in os.environ if k.startswith('PET_')]\n"
    )
    run = ddpkit.launch("sub/train.py", args=[home], show=False, timeout=120)
    path = home / "sub" / "train.py"
    assert run.ok, run.ranks[0].stderr
    assert run.ranks[0].stdout == f"beside the script __main__ None ['{path}', '{home}'] True True\n"


def test_a_scripts_own_classes_reach_spawned_workers(home: Path) -> None:
    (home / "load.py").write_text(
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Numbers(Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return i\n"
        "if __name__ == '__main__':\n"
        "    print([b.tolist() for b in DataLoader(Numbers(), 2, num_workers=1, multiprocessing_context='spawn')])\n"
    )
    run = ddpkit.launch("load.py", show=False, timeout=240)
    assert run.ranks[0].stdout == "[[0, 1], [2, 3]]\n", run.ranks[0].stderr


def test_exit_functions_threads_and_exit_codes_are_pythons(home: Path) -> None:
    (home / "ends.py").write_text(
        "import atexit, os, sys, threading, time\n"
        "atexit.register(lambda: print('at exit'))\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), print('thread done'))).start()\n"
        "sys.stdout.write('no newline, not flushed ')\n"
        "if os.environ['RANK'] == '1': sys.exit(300)\n"
    )
    run = ddpkit.launch("ends.py", show=False, timeout=120)
    assert run.ranks[0].stdout == "no newline, not flushed thread done\nat exit\n"
    assert run.ranks[1].stdout == run.ranks[0].stdout
    assert [r.exitcode for r in run.ranks] == [0, 300 & 0xFF]


def test_the_scripts_own_excepthook_is_called(home: Path) -> None:
    (home / "hook.py").write_text(
        "import sys\nsys.excepthook = lambda k, e, t: print('mine:', e)\nraise ValueError('x')\n"
    )
    run = ddpkit.launch("hook.py", nproc=1, show=False, timeout=120)
    assert run.ranks[0].stdout == "mine: x\n"
    assert run.ranks[0].failure.message == "x"


def test_a_forked_childs_failure_is_not_the_ranks(home: Path) -> None:
    (home / "forks.py").write_text(
        "import os\nchild = os.fork()\nif child == 0: raise ValueError('in the child')\nos.waitpid(child, 0)\n"
        "if os.environ['RANK'] == '1': os._exit(5)\n"
    )
    run = ddpkit.launch("forks.py", show=False, timeout=120)
    assert (run.culprit, run.ranks[0].failure, run.ranks[0].exitcode) == (1, None, 0)
    assert (run.ranks[1].failure.type, run.ranks[1].exitcode) == ("os._exit", 5)


def test_run_folders_are_ignored_by_git_and_pruned(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wire.ENV_KEEP_RUNS, "2")
    (home / "p.py").write_text("print('hello')\n")
    going_on = home / ".ddpkit" / "runs" / "20200101-000000-000-on_slurm"
    going_on.mkdir(parents=True)
    wire.write_record(going_on / wire.JOB, {"slurm": "12", "launched_by": 2**22})
    runs = [ddpkit.launch("p.py", nproc=1, show=False, timeout=60) for _ in range(4)]
    assert (home / ".ddpkit" / ".gitignore").read_text() == "*\n"
    assert [r.folder.exists() for r in runs] == [False, False, True, True]
    assert going_on.exists(), "a job on Slurm goes on without the process that launched it"


def test_reports_are_merged_by_rank(home: Path) -> None:
    (home / "r.py").write_text(
        "import os, torch\nfrom ddpkit.rank import report\n"
        "report(loss=1.5, shape=torch.ones(2, 2))\nreport(loss=torch.tensor(0.5), who=int(os.environ['RANK']))\n"
        "try: report(bad=object())\nexcept TypeError as e: print(e)\n"
    )
    run = ddpkit.launch("r.py", show=False, timeout=120)
    assert run.reported[1] == {"loss": 0.5, "shape": [[1.0, 1.0], [1.0, 1.0]], "who": 1}, str(run)
    assert run.ranks[0].reports[0]["loss"] == 1.5
    assert "report: bad= is a object, which has no JSON form" in run.ranks[0].stdout


def test_setup_brings_the_group_up_and_down(home: Path) -> None:
    (home / "s.py").write_text(
        "import torch, torch.distributed as dist\nfrom ddpkit.rank import setup, report\n"
        "with setup() as here:\n"
        "    t = torch.full((2,), float(here.rank), device=here.device)\n"
        "    dist.all_reduce(t)\n"
        "    report(sum=t, backend=here.backend, world=here.world_size)\n"
        "report(up=dist.is_initialized())\n"
    )
    run = ddpkit.launch("s.py", nproc=3, backend="gloo", show=False, timeout=120)
    assert run.reported[2] == {"sum": [3.0, 3.0], "backend": "gloo", "world": 3, "up": False}, str(run)


def test_setup_names_the_culprit_though_it_tears_down_first(home: Path) -> None:
    (home / "s.py").write_text(
        "import torch, torch.distributed as dist\nfrom ddpkit.rank import setup\n"
        "with setup(timeout_s=60) as here:\n"
        "    if here.rank == 1: raise KeyError('mine')\n"
        "    dist.all_reduce(torch.ones(1))\n"
    )
    run = ddpkit.launch("s.py", show=False, timeout=120)
    assert run.culprit == 1 and run.ranks[0].role == "consequence", str(run)


def test_setup_without_torchrun_is_a_job_of_one(home: Path) -> None:
    import subprocess
    import sys

    code = (
        "import torch, torch.distributed as dist\nfrom ddpkit.rank import setup\n"
        "with setup() as here:\n    t = torch.ones(1); dist.all_reduce(t); print(here.world_size, t.item())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "1 1.0\n", done.stderr


def test_unknown_backend_in_a_rank(home: Path) -> None:
    (home / "s.py").write_text("from ddpkit.rank import setup\nwith setup('glooo'): pass\n")
    run = ddpkit.launch("s.py", show=False, timeout=120)
    assert 'backend "glooo" is not one of gloo, nccl' in run.ranks[0].failure.message


def test_every_kind_of_target_has_a_name(home: Path) -> None:
    (home / "train.py").write_text("")
    assert resolve("train.py", [], {}).name == "train"
    assert resolve("json.tool", [], {}).name == "tool"
    assert resolve(lambda: 1, [], {}).name == "function"
