"""`launch`: target and options become a torchrun command, a watched job and a `Run`. Knows no widget; takes a sink."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from . import machine, wire, zygote
from .errors import LaunchError
from .process import Job, Start
from .run import Run, save_spec
from .target import Target, resolve
from .watch import Limits, Watcher

BACKENDS = ("gloo", "nccl")
DEFAULT_KEPT_RUNS = 100
_OPTIONS = (
    "target args kwargs nproc backend env timeout stall stop_on_stall warm wait check show name reveal max_restarts torchrun"
).split()
# What ipykernel sets for itself, and what would make a rank's output differ from a terminal's.
_NOTEBOOK_ONLY = ("JPY_PARENT_PID", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "PYDEVD_USE_FRAME_EVAL")


def launch(
    target: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    nproc: int | str = 2,
    backend: str | None = None,
    env: Mapping[str, str | None] | None = None,
    timeout: float | None = None,
    stall: float | None = 10.0,
    stop_on_stall: bool = False,
    warm: bool = True,
    wait: bool = True,
    check: bool = False,
    show: bool | str = True,
    name: str | None = None,
    reveal: bool = True,
    max_restarts: int = 0,
    torchrun: Sequence[str] = (),
    **unknown: Any,
) -> Run:
    """Start a real torchrun job on this machine and return its `Run`. A job that fails raises nothing, as with `subprocess.run`.

    Args:
        target: path of a script, name of a module, or a function, defined in a cell too.
        args: the script's arguments as strings, or the function's positional arguments.
        kwargs: the function's keyword arguments.
        nproc: ranks on this machine; "gpu", "cpu" or "auto" as with torchrun.
        backend: "gloo" or "nccl" for `ddpkit.rank.setup()`; None takes nccl where each rank has a GPU of its own.
        env: environment variables to add; None as a value takes one away.
        timeout: seconds after which the job is ended, with every rank's stack in the run; None lets it run.
        stall: seconds without output or report after which the ranks' stacks are gathered and shown.
        stop_on_stall: end the job at the first stall (state "hung").
        warm: fork the job from a process that has torch imported already; False starts every process anew. `run.warm` tells.
        wait: False returns at once with a live `Run` (`.wait()`, `.stop()`).
        check: raise `JobFailed` unless the job passes.
        show: True shows the live view in a notebook and text elsewhere; "text" streams rank-tagged text; False is silent.
        name: what the run is called; by default the target's own name.
        reveal: False keeps the verdict out of the view and the text, so that a reader can judge first.
        max_restarts: how often torchrun starts the ranks anew after a failure.
        torchrun: further options for torchrun itself, such as ["--rdzv-conf", "timeout=60"].

    Raises:
        LaunchError: the job cannot be started as asked; nothing was started.
        JobFailed: with `check=True`, the job did not pass.
    """
    if unknown:
        raise LaunchError(_about_unknown(unknown))
    options = checked_options(
        nproc=nproc,
        backend=backend,
        env=env,
        timeout=timeout,
        stall=stall,
        stop_on_stall=stop_on_stall,
        max_restarts=max_restarts,
        torchrun=torchrun,
        name=name,
        reveal=reveal,
        warm=warm,
    )
    refuse_inside_a_rank()
    return start(resolve(target, args, kwargs or {}), options, wait=wait, check=check, show=show)


@dataclass(frozen=True)
class Options:
    """How a job is to be run; what `launch` and the cell magic make of their options."""

    nproc: int = 2
    backend: str | None = None
    env: Mapping[str, str | None] | None = None
    timeout_s: float | None = None
    stall_s: float | None = 10.0
    stop_on_stall: bool = False
    max_restarts: int = 0
    torchrun: tuple[str, ...] = ()
    name: str | None = None
    reveal: bool = True
    warm: bool = True


def checked_options(
    *,
    nproc: Any = 2,
    backend: str | None = None,
    env: Mapping[str, str | None] | None = None,
    timeout: Any = None,
    stall: Any = 10.0,
    stop_on_stall: bool = False,
    max_restarts: Any = 0,
    torchrun: Sequence[str] = (),
    name: str | None = None,
    reveal: bool = True,
    warm: bool = True,
) -> Options:
    """The options as asked for, each checked.

    Raises:
        LaunchError: one of them cannot be.
    """
    if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
        raise LaunchError(f"launch: max_restarts={max_restarts!r} is not a count; give 0 or more.")
    if isinstance(torchrun, str):
        raise LaunchError(f"launch: torchrun={torchrun!r} is one string; give a list, such as {torchrun.split()!r}.")
    return Options(
        nproc=_ranks_asked_for(nproc),
        backend=backend,
        env=dict(env or {}),
        timeout_s=_seconds("timeout", timeout),
        stall_s=_seconds("stall", stall),
        stop_on_stall=stop_on_stall,
        max_restarts=max_restarts,
        torchrun=tuple(torchrun),
        name=name,
        reveal=reveal,
        warm=warm,
    )


def warm_up() -> None:
    """Begin to import torch in the background, so that the first launch is fast; called where a notebook loads ddpkit."""
    zygote.begin(_base_environment())


def start(target: Target, options: Options, *, wait: bool = True, check: bool = False, show: bool | str = True) -> Run:
    """Start `target`; with `wait`, return when it is over. Called by `launch`, the cell magic and the command line."""
    from . import notebook

    env = _environment(target, options)
    backend = _decided_backend(options, env)
    env[wire.ENV_BACKEND] = backend
    sink = notebook.sink_for(show)
    folder = _new_run_folder(options.name or target.name)
    command = _torchrun(target.write(folder), options)
    spec = _spec(target, options, command, env, backend)
    save_spec(folder, spec)
    env[wire.ENV_RUN] = str(folder)
    job = Job(
        folder,
        Start(
            command,
            env | _torchrun_settings(folder),
            "" if options.warm else "warm=False",
            target.imports_from(folder),
            target.variables(),
            _base_environment(),
            zygote.PATIENCE_S if wait else 0,
        ),
    )
    save_spec(folder, {**spec, "cold_because": job.cold_because})
    run = Run(folder, job, options.reveal)
    limits = Limits(options.timeout_s, options.stall_s, options.stop_on_stall)
    sink.begin(run, lambda: job.stop("stopped"))
    notebook.show_live(sink)
    Watcher(run, job, sink, limits).start()
    if wait:
        _wait(job)
        notebook.show_ended(run, sink)
    return run.check() if check and wait else run


def _wait(job: Job) -> None:
    """Wait for the end of the job; an interrupt ends it, and control comes back when nothing of it is left."""
    while not job.over.is_set():
        try:
            job.over.wait()
        except KeyboardInterrupt:
            job.stop("stopped")


# What is asked for, checked.


def refuse_inside_a_rank() -> None:
    """A rank that launches jobs would launch as many as there are ranks."""
    if wire.ENV_RUN in os.environ and "RANK" in os.environ:
        raise LaunchError(
            f"launch: called inside rank {os.environ['RANK']} of a running job, where every rank would start a job of its own; "
            'call it from the notebook, or guard the call with `if __name__ == "__main__"` in a file that ranks import.'
        )


def _about_unknown(unknown: Mapping[str, Any]) -> str:
    name = next(iter(unknown))
    near = difflib.get_close_matches(name, _OPTIONS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}=?" if near else "a function's own arguments go in args= and kwargs=."
    return f"launch: there is no option {name}=; {hint}"


def _ranks_asked_for(nproc: Any) -> int:
    gpus = len(machine.visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))) if isinstance(nproc, str) else 0
    named = {"cpu": os.cpu_count() or 1, "gpu": gpus, "auto": gpus or os.cpu_count() or 1}
    if nproc == "gpu" and not gpus:
        raise LaunchError('launch: nproc="gpu" asked for, but no GPU is visible; use a number, or "cpu".')
    number = named.get(nproc, nproc) if isinstance(nproc, str) else nproc
    if isinstance(number, str) and number.isdigit():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int):
        raise LaunchError(f'launch: nproc={nproc!r} is not a number of ranks; use 1 or more, "cpu", "gpu" or "auto".')
    most = machine.most_ranks()
    if number < 1:
        raise LaunchError(f"launch: nproc={number} asked for; a job has at least one rank.")
    if number > most:
        raise LaunchError(
            f"launch: {number} ranks asked for on {os.cpu_count()} cores; the most allowed here is {most}."
        )
    return number


def _seconds(option: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise LaunchError(f"launch: {option}={value!r} is not a time; give seconds above 0, or None for no limit.")
    return float(value)


def _decided_backend(options: Options, env: Mapping[str, str]) -> str:
    """NCCL where each rank has a GPU of its own, otherwise gloo; decided before any rank starts."""
    asked = options.backend or env.get(wire.ENV_BACKEND)
    if asked is not None and asked not in BACKENDS:
        near = difflib.get_close_matches(asked.lower(), BACKENDS, n=1)
        hint = f'did you mean "{near[0]}"?' if near else "use one of them, or None to have it chosen."
        raise LaunchError(f'launch: backend "{asked}" is not one of {", ".join(BACKENDS)}; {hint}')
    visible = env.get("CUDA_VISIBLE_DEVICES")
    gpus = len(machine.visible_gpus(visible)) if _torch_has_cuda() else 0
    if asked == "nccl" and gpus < options.nproc:
        said = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        advice = f'nproc={gpus}, or backend="gloo"' if gpus else 'backend="gloo"'
        found = f"{gpus} GPUs are visible{said}" if _torch_has_cuda() else "this torch was built without CUDA"
        raise LaunchError(f'launch: {options.nproc} ranks asked for with backend "nccl", but {found}. Use {advice}.')
    return asked or ("nccl" if gpus >= options.nproc else "gloo")


def _torch_has_cuda() -> bool:
    """Whether the installed torch can use CUDA, by its version's local tag; torch is not imported."""
    try:
        return "+cpu" not in metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise LaunchError(f"launch: torch is not installed for {sys.executable}; pip install torch.") from None


# What is started.


def _torchrun(target: Sequence[str], options: Options) -> list[str]:
    """The plain command line. Logs, and ddpkit's part in each rank, come in through the environment."""
    own_rendezvous = any(o.startswith(("--rdzv", "--master", "--nnodes", "--node-rank")) for o in options.torchrun)
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += [] if own_rendezvous else ["--standalone"]
    command += ["--nproc-per-node", str(options.nproc)]
    command += ["--max-restarts", str(options.max_restarts)] if options.max_restarts else []
    return [*command, *options.torchrun, *target]


def _torchrun_settings(folder: Path) -> dict[str, str]:
    return {
        "PYTHON_EXEC": str(folder / wire.RANK_PYTHON),
        "PET_LOG_DIR": str(folder / wire.LOGS),
        "PET_REDIRECTS": "3",
        "PET_MONITOR_INTERVAL": "0.05",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
    }


def _base_environment() -> dict[str, str]:
    """This process's environment without what only concerns a notebook."""
    env = {k: v for k, v in os.environ.items() if k not in _NOTEBOOK_ONLY and not k.startswith("PET_")}
    if "matplotlib_inline" in env.get("MPLBACKEND", ""):
        del env["MPLBACKEND"]
    return env


def _environment(target: Target, options: Options) -> dict[str, str]:
    env = _base_environment()
    if target.path_folder:
        env["PYTHONPATH"] = os.pathsep.join(p for p in (target.path_folder, env.get("PYTHONPATH")) if p)
    for key, value in (options.env or {}).items():
        if value is None:
            env.pop(key, None)
        else:
            env[key] = str(value)
    return env


def _changed(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if os.environ.get(k) != v}


def _spec(
    target: Target, options: Options, command: Sequence[str], env: Mapping[str, str], backend: str
) -> dict[str, Any]:
    changed = _changed(env)
    words = shlex.join(command)
    settings = " ".join(f"{k}={shlex.quote(v)}" for k, v in changed.items())
    devices = "CPU" if backend == "gloo" else f"{options.nproc} GPU" + "s" * (options.nproc > 1)
    return {
        "name": options.name or target.name,
        "nproc": options.nproc,
        "backend": backend,
        "device_words": f"{backend} on {devices}",
        "command": f"cd {shlex.quote(os.getcwd())} && {settings + ' ' if settings else ''}{words}",
        "torchrun": list(command),
        "cwd": os.getcwd(),
        "env": changed,
        "timeout_s": options.timeout_s,
        "stall_s": options.stall_s,
        "notes": list(target.notes),
        "versions": {"python": sys.version.split()[0], "torch": metadata.version("torch"), "ddpkit": _version()},
        "started_ns": time.time_ns(),
        "launched_by": os.getpid(),
    }


def _version() -> str:
    from . import __version__

    return __version__


# Where it is written down.


def home() -> Path:
    """Where run folders are made: $DDPKIT_HOME, or .ddpkit in the working directory."""
    return Path(os.environ.get(wire.ENV_HOME) or Path.cwd() / ".ddpkit").expanduser().resolve()


def _new_run_folder(name: str) -> Path:
    runs = home() / "runs"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        ignore = home() / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", encoding="utf-8")
        _prune(runs)
        return _made(runs, name)
    except OSError as error:
        raise LaunchError(
            f"launch: the run folder cannot be made in {runs} ({error.strerror}); make room there or allow writing, "
            f"or set {wire.ENV_HOME} to another folder."
        ) from None


def _made(runs: Path, name: str) -> Path:
    """A folder nobody else has, named by the millisecond and the job: in the order of their names the oldest comes first."""
    job = re.sub(r"[^0-9A-Za-z_.-]+", "_", name)[:40]
    while True:
        now_ms = time.time_ns() // 1_000_000
        moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_ms // 1000))
        folder = runs / f"{moment}-{now_ms % 1000:03d}-{job}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
        time.sleep(0.001)


def _prune(runs: Path) -> None:
    """Delete the oldest runs above the cap, of those that are over."""
    kept = int(os.environ.get(wire.ENV_KEEP_RUNS, DEFAULT_KEPT_RUNS))
    over = sorted(folder for folder in runs.iterdir() if _is_over(folder))
    for folder in over[: max(0, len(over) - kept + 1)]:
        shutil.rmtree(folder, ignore_errors=True)


def _is_over(folder: Path) -> bool:
    """Whether the run has come to its end, or the process that launched it has gone without a word."""
    if (folder / wire.END).exists():
        return True
    launched_by = (wire.read_record(folder / wire.JOB) or {}).get("launched_by")
    return launched_by is not None and not Path(f"/proc/{launched_by}").exists()
