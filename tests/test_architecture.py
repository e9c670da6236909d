"""The walls of the house: which room may import which, what `import ddpkit` costs, and that no name shadows a function."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ddpkit"

# Arrows go only downward: a room may import those named here, at its top or inside its functions.
ALLOWED: dict[str, set[str]] = {
    "__init__": {
        *(
            "bench",
            "exercise",
            "grading",
            "launcher",
            "logdiagnosis",
            "examination",
            "run",
            "catalog",
            "errors",
            "magic",
            "recordings",
        ),
    },
    "recordings": {"catalog", "run"},
    "cli": {
        "traincli",
        "smokecli",
        "options",
        "launcher",
        "logdiagnosis",
        "diagnosis",
        "examination",
        "catalog",
        "exercise",
        "student",
        "errors",
    },
    "smokecli": {"diagnosis", "launcher", "options", "run", "traincli"},
    "traincli": {"config", "configwords", "errors", "launcher", "machine", "options", "run", "wire"},
    "logdiagnosis": {
        *("logcause", "logscan", "loglines", "run", "diagnosis", "culprit", "catalog", "stable", "errors", "wire"),
    },
    "logcause": {"logscan", "loglines", "tracebacks", "catalog"},
    "logscan": {"loglines", "tracebacks", "deaths", "literals", "catalog"},
    "tracebacks": {"loglines", "frames"},
    "deaths": {"loglines"},
    "loglines": {"errors"},
    "literals": set(),
    "examination": {"checks", "torchchecks"},
    "torchchecks": {"checks", "machine"},
    "checks": {"logscan", "loglines"},
    "student": {"errors"},
    "bench": {"benchview", "comparison", "trial", "lab", "run", "sink", "steps", "picture", "errors"},
    "grading": {"exercise", "launcher", "trial", "run", "steps", "errors", "wire"},
    "exercise": {"lab", "launcher", "options", "folders", "run", "target", "errors", "wire"},
    "benchview": {"bench", "lab", "markup", "view", "errors"},
    "comparison": {"bench", "steps", "picture"},
    "trial": {"culprit", "lab", "launcher", "options", "run", "sink", "steps", "target", "errors", "wire"},
    "lab": {"catalog", "errors"},
    "steps": {"run", "wire"},
    "magic": {"launcher", "options", "target", "errors"},
    "launcher": {
        "notebook",
        "target",
        "watch",
        "process",
        "run",
        "sink",
        "options",
        "folders",
        "errors",
        "wire",
        "zygote",
        "__init__",
    },
    "options": {"machine", "errors", "wire"},
    "folders": {"errors", "wire"},
    "notebook": {"view", "terminal", "markup", "run", "sink", "errors"},
    "view": {"evidence", "diagnosis", "frames", "sink", "run"},
    "terminal": {"evidence", "sink", "run"},
    "watch": {
        "cap",
        "tail",
        "process",
        "run",
        "endings",
        "records",
        "machine",
        "look",
        "lifesigns",
        "evidence",
        "finding",
        "standing",
        "standstill",
        "sink",
        "wire",
    },
    "look": {"frames", "machine", "outside", "process", "records", "wire"},
    "outside": set(),
    "lifesigns": {"look", "records", "wire"},
    "cap": {"tail", "process", "wire"},
    "tail": {"sink", "wire"},
    "process": {"zygote", "errors", "wire"},
    "zygote": {"client", "wire"},
    "target": {"hashseed", "errors", "wire"},
    "hashseed": set(),
    "markup": {"diagnosis", "evidence", "stable", "run"},
    "run": {
        "picture",
        "notebook",
        "markup",
        "process",
        "memoryplot",
        "timeline",
        "evidence",
        "diagnosis",
        "culprit",
        "account",
        "endings",
        "records",
        "stable",
        "errors",
        "wire",
        "folders",
    },
    "account": {"culprit", "endings", "records", "stable", "wire"},
    "memoryplot": {"run", "records", "stable", "picture", "wire"},
    "timeline": {"picture", "run", "evidence", "standing", "collectives", "records", "stable"},
    "evidence": {"catalog", "diagnosis", "endings", "standing", "frames", "records", "stable"},
    "diagnosis": {"endings", "catalog", "culprit", "records", "stable", "wire"},
    "catalog": set(),
    "culprit": {
        "collectives",
        "endings",
        "flags",
        "late",
        "standing",
        "standstill",
        "mismatch",
        "finding",
        "failures",
        "records",
    },
    "late": {"collectives", "endings", "standing", "finding", "frames", "records"},
    "flags": {"collectives", "endings", "finding", "mismatch", "parting", "records"},
    "endings": {"failures", "records", "stable"},
    "standstill": {
        "standing",
        "circle",
        "endings",
        "joining",
        "late",
        "mismatch",
        "parting",
        "finding",
        "collectives",
        "frames",
        "records",
    },
    "circle": {
        "collectives",
        "exchanges",
        "finding",
        "joining",
        "meshes",
        "parting",
        "rings",
        "servers",
        "standing",
        "storekeys",
        "tags",
        "turns",
    },
    "storekeys": {"standing", "collectives", "finding", "frames", "records"},
    "servers": {"exchanges", "finding", "standing"},
    "meshes": {"collectives", "finding", "frames"},
    "tags": {"standing", "finding", "collectives"},
    "turns": {"standing", "finding", "collectives", "meshes"},
    "rings": {"standing", "exchanges", "parting", "finding", "collectives"},
    "exchanges": {"standing", "parting", "finding", "collectives"},
    "joining": {"standing", "finding", "records"},
    "mismatch": {"standing", "parting", "finding", "collectives", "frames", "records"},
    "parting": {"collectives", "meshes"},
    "finding": set(),
    "standing": {"endings", "collectives", "finding", "frames", "records", "wire"},
    "records": {"collectives", "failures", "frames", "stable", "wire"},
    "failures": {"frames", "stable", "wire"},
    "collectives": {"frames", "wire"},
    "frames": {"wire"},
    "sink": {"evidence", "run"},
    "errors": {"run"},
    "machine": set(),
    "stable": set(),
    "wire": set(),
    "picture": set(),
    "config": {"configcheck", "configread", "configwords"},
    "configcheck": {"config"},
    "configread": set(),
    "configwords": {"configread"},
    "keeper": {"client", "oom", "wire"},
    "oom": set(),
    "client": set(),
    "rank": {
        *("checkpoint", "comm", "config", "data", "deadline", "example", "guard", "logs", "memory", "monitor"),
        *("process_group", "reports", "trainer", "training", "weights"),
    },
    "rank.zygote": {"keeper", "client", "wire", "rank.forked", "rank.observe"},
    "rank.forked": {"keeper", "client", "wire", "rank.bootstrap"},
    "rank.abort": set(),
    "rank.bootstrap": {
        "wire",
        "rank.abort",
        "rank.collectives",
        "rank.failure",
        "rank.keys",
        "rank.observe",
        "rank.signals",
        "rank.steps",
    },
    "rank.memory": {"wire", "rank.failure", "rank.limits"},
    "rank.limits": set(),
    "rank.probe": set(),
    "rank.steps": {"wire", "rank.failure", "rank.observe"},
    "rank.failure": {"wire"},
    "rank.around": set(),
    "rank.collectives": {"rank.around", "wire", "rank.failure", "rank.keys", "rank.peers"},
    "rank.keys": {"rank.failure"},
    "rank.signals": {"wire", "rank.failure"},
    "rank.peers": {"rank.brought", "rank.failure"},
    "rank.brought": set(),
    "rank.observe": {"rank.brought", "rank.collectives", "rank.failure", "rank.keys", "rank.peers"},
    "rank.function": {"wire"},
    "rank.process_group": {
        *(
            "wire",
            "rank.backends",
            "rank.collectives",
            "rank.environment",
            "rank.failure",
            "rank.rollcall",
            "rank.store",
        ),
    },
    "rank.reports": {"wire"},
    "rank.agreement": {"rank.guard"},
    "rank.backends": {"rank.environment", "rank.rollcall"},
    "rank.batches": {"rank.randomness"},
    "rank.buckets": set(),
    "rank.checkpoint": {"rank.process_group", "rank.randomness"},
    "rank.comm": {"rank.buckets", "rank.commstats"},
    "rank.commfigure": {"picture", "rank.commstats"},
    "rank.commstats": {"rank.buckets"},
    "rank.data": {"rank.agreement", "rank.batches", "rank.loadplan", "rank.process_group", "rank.workers"},
    "rank.deadline": {"rank.failure", "rank.guard", "rank.process_group"},
    "rank.environment": {"wire"},
    "rank.evaluation": {"rank.data", "rank.trainer"},
    "rank.example": {"config"},
    "rank.faults": {"rank.data", "rank.trainer"},
    "rank.guard": set(),
    "rank.loadplan": {"rank.process_group"},
    "rank.logs": {"rank.environment", "wire"},
    "rank.monitor": {"rank.failure", "rank.memory", "rank.reports", "rank.snapshot", "rank.usage"},
    "rank.optimization": {"config", "rank.parallel"},
    "rank.parallel": {"config", "rank.process_group"},
    "rank.profiling": {"rank.comm", "rank.process_group", "rank.reports"},
    "rank.progress": {"rank.guard", "rank.process_group"},
    "rank.randomness": set(),
    "rank.recovery": {"config", "rank.guard", "rank.memory", "rank.optimization", "rank.process_group"},
    "rank.rollcall": {"rank.store"},
    "rank.saves": {"rank.checkpoint", "rank.trainer"},
    "rank.smoke": {"rank.environment", "rank.process_group"},
    "rank.snapshot": {"rank.limits", "rank.memory", "wire"},
    "rank.store": {"rank.environment"},
    "rank.trainer": {
        "config",
        "rank.data",
        "rank.deadline",
        "rank.evaluation",
        "rank.example",
        "rank.guard",
        "rank.loadplan",
        "rank.monitor",
        "rank.optimization",
        "rank.parallel",
        "rank.process_group",
        "rank.profiling",
        "rank.progress",
        "rank.randomness",
        "rank.recovery",
        "rank.saves",
    },
    "rank.training": {
        "config",
        "rank.faults",
        "rank.logs",
        "rank.memory",
        "rank.process_group",
        "rank.reports",
        "rank.trainer",
    },
    "rank.usage": {"rank.limits", "rank.memory"},
    "rank.weights": set(),
    "rank.workers": {"oom"},
}


HALL = {"wire", "picture", "keeper", "client", "oom", "config", "configcheck", "configread", "configwords"}


@functools.cache
def rooms() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if not {"catalog", "exercises"} & set(path.parts):
            name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            found[name.removesuffix(".__init__") if name != "__init__" else name] = path
    return found


@functools.cache
def imports(path: Path, room: str) -> set[str]:
    """The rooms that `path` imports, lazily or not, by their names in `ALLOWED`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            inside = node.level > 0 or (node.module or "").split(".")[0] == "ddpkit"
            if not inside:
                continue
            base = (node.module or "").removeprefix("ddpkit").strip(".")
            if node.level and room.startswith("rank.") and base:
                base = f"rank.{base}"
            for alias in node.names:
                full = f"{base}.{alias.name}" if base else alias.name
                if node.level and room.startswith("rank.") and not base:
                    full = f"rank.{alias.name}"
                found.add(full if full in rooms() else base or "__init__")
    return found


def test_every_room_imports_only_what_the_plan_allows() -> None:
    built = rooms()
    for room, path in built.items():
        assert room in ALLOWED, f"{room} is a new room: say in docs/architecture.md and here what it may import"
        extra = imports(path, room) - ALLOWED[room]
        assert not extra, f"{room} imports {sorted(extra)}"
    for room, allowed in ALLOWED.items():
        unused = allowed - imports(built[room], room)
        assert not unused, f"{room} no longer imports {sorted(unused)}: take it off the plan"


def test_the_two_wings_never_meet() -> None:
    for room, allowed in ALLOWED.items():
        if room.startswith("rank."):
            assert all(a in HALL or a.startswith("rank.") for a in allowed)
        elif room != "rank":
            assert not any(a.startswith("rank") for a in allowed)


def test_the_notebook_wing_never_imports_torch() -> None:
    for room, path in rooms().items():
        if not room.startswith("rank"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not any(n.split(".")[0] == "torch" for n in names), f"{room} imports torch"


def test_no_module_shadows_a_public_name() -> None:
    import ddpkit

    assert not {n for n in ddpkit.__all__ if (PACKAGE / f"{n}.py").exists()}


def test_a_file_of_the_training_kit_can_be_read_at_a_sitting() -> None:
    assert not {path.name for path in (PACKAGE / "rank").glob("*.py") if len(path.read_text().splitlines()) > 300}


def test_every_python_file_opens_with_a_sentence() -> None:
    for folder in ("ddpkit", "tests", "tools", "benchmarks"):
        for path in (PACKAGE.parent / folder).rglob("*.py"):
            assert ast.get_docstring(ast.parse(path.read_text())), f"{path} opens without a sentence on its role"


def test_no_function_outgrows_a_screen() -> None:
    for room, path in rooms().items():
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
