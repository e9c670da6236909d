"""The walls of the house: which folder may import which, what `import ddpkit` costs, and that no name shadows a function."""

from __future__ import annotations

import ast
import functools
import statistics
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ddpkit"
# Raise one of these only with a reason in docs/architecture.md.
MOST_LINES, MOST_FILES = 300, 14
# 20,500 lines, and what lessons got since: questions, predictions and readers' copies (300 lines), checks that ask the
# records (120), the memory of a smaller host (95), the reader's own run on the bench (60), `ddpkit look` (400), text in a
# kernel, the time of a line and what a silent rank does (220), whole statements and the names of files and parameters (210),
# remedies that find a call in the reader's own script (340), the time of a rank that saves when it is told to end (190), logs of
# unknown launchers and several launches (250), the list of failures by family (10), which GPUs are close (70), several agents
# and Slurm (1,180). The verdict: 2,000 lines, and a host that is gone (10). The tests: 15,000, and a real Slurm (1,000).
MOST_LINES_OF_PACKAGE, MOST_LINES_OF_VERDICT, MOST_LINES_OF_TESTS = 23_950, 2_010, 16_000

# Arrows go only downward: a folder, or a file at the top, may import those named here, lazily or not.
MAY_IMPORT = {
    "__init__": "course diagnosis diagnosis.log errors launcher machine run",
    "cli": "course diagnosis diagnosis.log errors launcher machine processes watcher",
    "course": "diagnosis display errors launcher run runfolder",
    "launcher": "diagnosis display errors machine processes run runfolder settings watcher",
    "watcher": "display machine processes run runfolder verdict",
    "run": "diagnosis display processes runfolder verdict",
    "display": "diagnosis errors runfolder verdict",
    "diagnosis.log": "diagnosis errors run runfolder verdict",
    "diagnosis": "runfolder verdict",
    "verdict": "runfolder",
    "machine": "diagnosis.log",
    "processes": "errors runfolder",
    "runfolder": "errors",
    "settings": "",
    "errors": "",
    # Inside a rank. Of the notebook side only what both sides share: names, settings, the figure, keepers.
    "recorder": "processes runfolder",
    "rank": "runfolder settings rank.comm rank.guarding rank.joining rank.loading rank.memory rank.saving rank.trainer",
    "rank.trainer": "rank rank.comm rank.guarding rank.joining rank.loading rank.memory rank.saving settings",
    "rank.comm": "",
    "rank.guarding": "rank.joining recorder",
    "rank.joining": "recorder runfolder",
    "rank.loading": "processes rank.guarding rank.joining rank.saving",
    "rank.memory": "rank recorder runfolder",
    "rank.saving": "rank.guarding rank.joining",
}
IN_A_RANK = ("rank", "recorder")


@functools.cache
def files() -> dict[str, Path]:
    """Every file of the package by its dotted name, but the data of catalog and tasks."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if not {"catalog", "tasks"} & set(path.relative_to(PACKAGE).parts):
            found[".".join(path.relative_to(PACKAGE).with_suffix("").parts)] = path
    return found


def room_of(name: str) -> str:
    """The folder of a file, or the file itself at the top."""
    folder = name.rpartition(".")[0]
    return folder or name


def imported(name: str, path: Path) -> set[str]:
    """The files of the package that a file imports, and the folders where it imports from their door."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = (node.module or "").removeprefix("ddpkit").strip(".")
        if node.level:
            base = ".".join([*name.split(".")[: -node.level], *filter(None, [node.module])])
        elif (node.module or "").split(".")[0] != "ddpkit":
            continue
        for alias in node.names:
            full = f"{base}.{alias.name}".strip(".")
            found.add(full if full in files() else base or "__init__")
    return found


def test_every_folder_imports_only_what_the_plan_allows() -> None:
    used: dict[str, set[str]] = {}
    for name, path in files().items():
        rooms = {room_of(each) if each in files() else each for each in imported(name, path)}
        used.setdefault(room_of(name), set()).update(rooms)
    for room, rooms in used.items():
        assert room in MAY_IMPORT, f"{room} is new: say in docs/architecture.md and here what it may import"
        found, allowed = rooms - {room}, set(MAY_IMPORT[room].split())
        assert found <= allowed, f"{room} imports {sorted(found - allowed)}"
        assert allowed <= found, f"{room} no longer imports {sorted(allowed - found)}: take it off the plan"


def test_what_runs_beside_a_rank_and_what_runs_in_it_never_meet() -> None:
    for room, allowed in MAY_IMPORT.items():
        inside = room.split(".")[0] in IN_A_RANK
        for other in allowed.split():
            assert inside or other.split(".")[0] not in IN_A_RANK, f"{room} imports {other}"


def test_the_notebook_side_never_imports_torch() -> None:
    for name, path in files().items():
        if name.split(".")[0] not in IN_A_RANK and name != "machine.probe":
            for node in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not any(n.split(".")[0] == "torch" for n in names), f"{name} imports torch"


def test_no_module_shadows_a_public_name() -> None:
    import ddpkit

    assert not {n for n in ddpkit.__all__ if (PACKAGE / f"{n}.py").exists() or (PACKAGE / n).exists()}


def test_no_two_files_import_each_other() -> None:
    """Nor by way of others; an import for types alone counts, too."""
    todo = {name: imported(name, path) & files().keys() for name, path in files().items()}
    while todo:
        free = [name for name, needs in todo.items() if not needs & todo.keys() - {name}]
        assert free, f"in a circle, or importing one: {sorted(todo)}"
        for name in free:
            del todo[name]


def test_the_package_stays_small() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in files().items()}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}
    assert sum(lines.values()) <= MOST_LINES_OF_PACKAGE
    assert sum(count for name, count in lines.items() if room_of(name) == "verdict") <= MOST_LINES_OF_VERDICT
    tests = [len(path.read_text().splitlines()) for path in Path(__file__).parent.glob("*.py")]
    assert sum(tests) <= MOST_LINES_OF_TESTS


def test_a_folder_shows_few_names() -> None:
    for folder in PACKAGE.rglob("*"):
        if folder.is_dir() and not {"catalog", "tasks", "__pycache__"} & set(folder.relative_to(PACKAGE).parts):
            names = [path.name for path in folder.iterdir() if path.is_file()]
            assert len(names) <= MOST_FILES, f"{folder.name}: {sorted(names)}"


def test_the_verdict_is_made_of_short_functions_and_plain_loops() -> None:
    comprehension = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    lengths = []
    for name, path in files().items():
        if room_of(name) != "verdict":
            continue
        nodes = list(ast.walk(ast.parse(path.read_text())))
        clever = sum(isinstance(node, comprehension) for node in nodes)
        assert 100 * clever <= 4 * len(path.read_text().splitlines()) or clever == 1, f"{name}: {clever} comprehensions"
        lengths += [_length(node) for node in nodes if isinstance(node, ast.FunctionDef)]
    assert statistics.median(lengths) < 12


def _length(function: ast.FunctionDef) -> int:
    """The lines of its body, without the docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_every_python_file_opens_with_a_sentence() -> None:
    for folder in ("ddpkit", "tests", "tools", "benchmarks"):
        for path in (PACKAGE.parent / folder).rglob("*.py"):
            assert ast.get_docstring(ast.parse(path.read_text())), f"{path} opens without a sentence on its role"


def test_no_function_outgrows_a_screen() -> None:
    for room, path in files().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = node.body[0].end_lineno if ast.get_docstring(node) else node.lineno
                assert (node.end_lineno or 0) - (body or 0) < 40, f"{room}.{node.name} is long"


def test_import_ddpkit_brings_neither_torch_nor_widgets() -> None:
    heavy = {"torch", "anywidget", "ipywidgets", "IPython", "numpy", "matplotlib"}
    code = f"import sys, ddpkit; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_unknown_name_is_told_what_there_is() -> None:
    done = subprocess.run([sys.executable, "-c", "import ddpkit; ddpkit.lunch"], capture_output=True, text=True)
    offers = "check, diagnose, doctor, explain, hint, launch, on_gpu, progress, reset, task"
    assert (
        "module 'ddpkit' has no attribute 'lunch'; it offers FixBench, JobFailed, LaunchError, LogError, Run, "
        in done.stderr
    )
    assert offers in done.stderr
