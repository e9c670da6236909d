"""Turns the user's target - a script, a module, a cell's text, a function - into something torchrun can start."""

from __future__ import annotations

import difflib
import importlib.machinery
import importlib.util
import inspect
import json
import linecache
import math
import os
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpkit.errors import LaunchError
from ddpkit.runfolder import wire

from .hashseed import orders_by_hash

LARGE_BYTES = 8 * 2**20

_CALL_SCRIPT = '''"""Written by ddpkit: calls the function `{name}` on this rank; the pickled call is in the same folder."""

import ddpkit.recorder.function as _ddpkit_function

# Its functions and classes become names of this file, so that spawned loader workers can import them.
globals().update(_ddpkit_function.load(__file__))

if __name__ == "__main__":
    _ddpkit_function.call(*_ddpkit_call)
'''


@dataclass(frozen=True)
class Target:
    """What torchrun starts: `command` follows torchrun's own options; `files` are first written to the run folder.

    A `command` entry that starts with "{folder}" is in the run folder. `path_folder` goes to the front of PYTHONPATH.
    `source` is the program, or the pickled function; `text` is the source of a function, if it is known.
    """

    name: str
    command: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    path_folder: str | None = None
    notes: tuple[str, ...] = ()
    source: bytes = b""
    text: str = ""

    @property
    def args(self) -> tuple[str, ...]:
        """The program's own arguments."""
        return self.command[2 if self.command[0] == "-m" else 1 :]

    def write(self, folder: Path) -> list[str]:
        """Write the files to the run folder and return the command with its paths filled in."""
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return [part.replace("{folder}", str(folder), 1) for part in self.command]

    def variables(self) -> list[str]:
        """Possible names of environment variables in a program that may set some before it imports torch."""
        sets_some = b"environ" in self.source or b"putenv" in self.source
        return sorted({n.decode() for n in re.findall(rb"[A-Z]+_[A-Z0-9_]+", self.source)}) if sets_some else []

    def orders_by_hash(self, env: Mapping[str, str]) -> bool:
        """Whether each rank of this program may use a different order in `env`, because of its hash seed."""
        return env.get("PYTHONHASHSEED", "random") in ("", "random") and orders_by_hash(self.text or self.source)


def resolve(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Target:
    """The `Target` for what `launch` was given.

    Raises:
        LaunchError: it is not a script, module or function, does not exist, or cannot be pickled.
    """
    if callable(target):
        return of_function(target, tuple(args), dict(kwargs))
    if kwargs:
        raise LaunchError("launch: kwargs= goes to a function; a script or module takes strings, in args=.")
    if not isinstance(target, str | os.PathLike):
        found = type(target).__name__
        raise LaunchError(f"launch: target is a {found}; give a script's path, a module's name or a function.")
    words = [str(a) for a in args]
    text = os.fspath(target)
    if text.endswith(".py") or os.sep in text or Path(text).is_file():
        return of_script(Path(text).expanduser(), words)
    return of_module(text, words)


def of_script(path: Path, args: Sequence[str]) -> Target:
    """The script at `path`, run from where it is; the run folder keeps a copy."""
    if path.is_dir():
        raise LaunchError(f"launch: {path} is a folder; give the script's own path, such as {path / 'train.py'}.")
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1)
        hint = f"did you mean {near[0]}?" if near else "check the path; it is relative to that folder."
        raise LaunchError(f"launch: there is no script {path} in {Path.cwd()}; {hint}")
    source = path.read_bytes()
    return Target(path.stem, (str(path.resolve()), *args), {f"script-{path.name}": source}, source=source)


def of_module(name: str, args: Sequence[str]) -> Target:
    """The module `name`, as `python -m` would find it, without importing it."""
    spec = _find_module(name)
    if spec is None:
        raise LaunchError(
            f"launch: no module {name!r} can be found from {Path.cwd()}; give a script's path (train.py), "
            "a module that python -m would find, or a function."
        )
    source = Path(spec.origin).read_bytes() if spec.has_location and spec.origin else b""
    return Target(name.rsplit(".", 1)[-1], ("-m", name, *args), source=source)


def _find_module(name: str) -> importlib.machinery.ModuleSpec | None:
    places: Sequence[str] | None = [os.getcwd(), *sys.path]
    for part in name.split("."):
        if not part.isidentifier() or places is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(part, places)
        if spec is None and part == name.partition(".")[0]:
            spec = _installed_otherwise(part)
        if spec is None:
            return None
        places = spec.submodule_search_locations
    return spec


def _installed_otherwise(package: str) -> importlib.machinery.ModuleSpec | None:
    """`package` as its own import finder gives it, for example for an editable installation."""
    try:
        return importlib.util.find_spec(package)
    except ValueError:
        return None


def of_text(
    text: str,
    name: str,
    args: Sequence[str] = (),
    asker: str = "launch",
    what: str = "the script",
    path_folder: str | None = None,
) -> Target:
    """A program given as text, saved as a script in the run folder; imports start from `path_folder`, else the current one.

    Raises:
        LaunchError: it does not compile; the message starts with `asker` and calls the text `what`.
    """
    stem = re.sub(r"[^0-9A-Za-z_]+", "_", name).strip("_") or "cell"
    # The script's folder is on sys.path, so the script must not have the name of a module that it may import.
    file = f"{stem}_cell.py" if _find_module(stem) else f"{stem}.py"
    try:
        compile(text, file, "exec", dont_inherit=True)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise LaunchError(f"{asker}: line {error.lineno} of {what} does not compile ({error.msg}): {line}") from None
    command, files = ("{folder}/" + file, *args), {file: text.encode()}
    return Target(name, command, files, path_folder=path_folder or os.getcwd(), source=text.encode())


def of_function(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Target:
    """A function of this process, also one defined in a cell: pickled by value, with the classes it needs."""
    name = getattr(function, "__name__", type(function).__name__)
    found = _reachable(function, [*args, *kwargs.values()])
    names = {k: v for k, v in found.items() if _is_notebooks(v)}
    call = _pickled(name, function, args, kwargs, names)
    context = {
        "sources": _sources([function, *names.values()]),
        "file": getattr(getattr(function, "__code__", None), "co_filename", ""),
        "sys_path": [p or os.getcwd() for p in sys.path],
    }
    return Target(
        name if name.isidentifier() else "function",
        ("{folder}/" + wire.FUNCTION_SCRIPT,),
        {
            wire.FUNCTION_SCRIPT: _CALL_SCRIPT.format(name=name).encode(),
            wire.CALL: call,
            wire.CALL_CONTEXT: json.dumps(context).encode(),
        },
        path_folder=os.getcwd(),
        notes=_notes_on_size(name, call, function, args, kwargs),
        source=call,
        text="\n".join(_own_text(item) for item in (function, *names.values())),
    )


def _own_text(item: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(item))
    except (OSError, TypeError):
        return ""


def _pickled(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], names: dict[str, Any]
) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps((function, args, kwargs, names))
    except Exception as error:
        size, guilty = max(_sizes(function, args, kwargs), default=(0, ""))
        what = f"because {guilty} cannot" if size == math.inf else f"({error})"
        raise LaunchError(
            f"launch: the function {name} cannot be pickled for the ranks, {what}; make it inside the function instead."
        ) from None


def _notes_on_size(
    name: str, call: bytes, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, ...]:
    """A warning that names the largest value pickled with the function, if the pickle is large."""
    if len(call) < LARGE_BYTES:
        return ()
    size, what = max(_sizes(function, args, kwargs), default=(len(call), "the function itself"))
    return (
        f"{name} carries {len(call) / 2**20:.0f} MiB to every rank, {size / 2**20:.0f} MiB of it in {what}; "
        "load it inside the function, or pass a path.",
    )


def _sizes(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """The size of each value pickled with `function`, and its description; infinite if it cannot be pickled."""
    import cloudpickle

    for what, value in _carried(function, args, kwargs):
        try:
            yield len(cloudpickle.dumps(value)), what
        except Exception:
            yield math.inf, what


def _carried(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values pickled with `function`, each with its description."""
    yield from ((f"args[{i}]", value) for i, value in enumerate(args))
    yield from ((f"kwargs[{k!r}]", value) for k, value in kwargs.items())
    if inspect.isfunction(function):
        captured = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        yield from ((f"the captured variable {name!r}", cell.cell_contents) for name, cell in captured)
    found = _reachable(function, [])
    yield from ((f"the global {k!r}", v) for k, v in found.items() if not _is_notebooks(v) and not inspect.ismodule(v))


def _reachable(function: Any, values: Sequence[Any]) -> dict[str, Any]:
    """The globals that `function`, the notebook functions and classes it uses, and the classes of `values` refer to."""
    found: dict[str, Any] = {}
    todo = [function, *(type(v) for v in values)]
    seen: set[int] = set()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if inspect.isclass(item) and _is_notebooks(item):
            found.setdefault(item.__name__, item)
            todo += [*item.__bases__, *vars(item).values()]
        code = getattr(inspect.unwrap(item) if callable(item) else item, "__code__", None)
        # The type of functions has a `__code__` too, which is not a code object.
        for name, value in _globals_used(item, code) if isinstance(code, types.CodeType) else ():
            found.setdefault(name, value)
            if _is_notebooks(value):
                todo.append(value)
    return found


def _globals_used(function: Any, code: Any) -> Iterator[tuple[str, Any]]:
    space = getattr(function, "__globals__", {})
    names = set(code.co_names)
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            names |= set(constant.co_names)
    yield from ((name, space[name]) for name in sorted(names) if name in space)


def _is_notebooks(value: Any) -> bool:
    """Whether `value` is a function or class defined in the notebook, which ranks cannot import."""
    return (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == "__main__"


def _sources(items: Sequence[Any]) -> dict[str, str]:
    """The source of the cells that define `items`, by the file name in tracebacks; files on disk are left out."""
    found = {}
    for item in items:
        parts = [item, *vars(item).values()] if inspect.isclass(item) else [item]
        for code in (getattr(p, "__code__", None) for p in parts):
            if code and code.co_filename not in found and not os.path.exists(code.co_filename):
                found[code.co_filename] = "".join(linecache.getlines(code.co_filename))
    return {file: text for file, text in found.items() if text}
