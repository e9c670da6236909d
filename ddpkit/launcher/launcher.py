"""`launch`: turns a target and its options into a torchrun command, a watched job and a `Run`."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpkit.display import notebook
from ddpkit.display.sink import Sink
from ddpkit.errors import LaunchError
from ddpkit.processes import zygote
from ddpkit.processes.agent import Job, LocalJob
from ddpkit.processes.zygote import Start
from ddpkit.run import Run
from ddpkit.runfolder import wire
from ddpkit.runfolder.folders import new_run_folder
from ddpkit.watcher.far import FarProgress
from ddpkit.watcher.progress import Progress
from ddpkit.watcher.watcher import Limits, Watcher

from .job_record import described
from .on_slurm import start_on_slurm
from .options import Options, checked_options, decided_backend, free_port, gpus_of_each_agent, sharing, value_of
from .slurm import SlurmOptions
from .target import Target, resolve

# Variables that ipykernel sets for itself, or that would make a rank's output differ from a terminal's.
_NOTEBOOK_ONLY = ("JPY_PARENT_PID", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "PYDEVD_USE_FRAME_EVAL")


def launch(
    target: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    nproc: int | str = 2,
    nnodes: int | str = 1,
    slurm: SlurmOptions | None = None,
    backend: str | None = None,
    env: Mapping[str, str | None] | None = None,
    timeout: float | None = None,
    stall: float | None = 10.0,
    stop_on_stall: bool = False,
    warm: bool = True,
    wait: bool = True,
    check: bool = False,
    show: bool | str | None = None,
    name: str | None = None,
    reveal: bool = True,
    max_restarts: int = 0,
    torchrun: Sequence[str] = (),
    share_gpu: bool = False,
    expect_replicas: bool = True,
    **unknown: Any,
) -> Run:
    """Start a real torchrun job on this machine and return its `Run`. Like `subprocess.run`, it does not raise if the job fails.

    Args:
        target: path of a script, name of a module, or a function, which may be defined in a cell.
        args: the script's arguments as strings, or the function's positional arguments.
        kwargs: the function's keyword arguments.
        nproc: ranks of each agent; "gpu", "cpu" or "auto" as with torchrun.
        nnodes: agents, all on this machine, as if each were on a host of its own; "1:2" for an elastic job that starts with
            two and may go on with one.
        slurm: hosts of a Slurm cluster instead of this machine, as `ddpkit.SlurmOptions(nodes=2)`; the run folder must be on a
            file system that all hosts share. `timeout` then counts from the submission.
        backend: "gloo" or "nccl" for `ddpkit.rank.setup()`; None means nccl if each rank has its own GPU, else gloo.
        env: environment variables to add; a value of None removes the variable.
        timeout: seconds after which the job is ended, with every rank's stack in the run; None means no limit.
        stall: seconds without output, report or new collective after which the ranks' stacks are gathered and shown.
        stop_on_stall: end the job at the first stall (state "hung"). If a rank still computes, waits for the disk, or has
            failed and is shutting down, wait five times as long.
        warm: fork the job from a process that has already imported torch; False starts new processes. See `run.warm`.
        wait: False returns at once with a live `Run` (`.wait()`, `.stop()`).
        check: raise `JobFailed` unless the job passes.
        show: True shows the live view in a notebook and text elsewhere; "text" streams rank-tagged text; False is silent;
            None is what DDPKIT_SHOW (text, 1 or 0) says, True without it.
        name: the run's name; by default the target's own name.
        reveal: False keeps the verdict out of the view and the text, so that a reader can judge first.
        max_restarts: how often torchrun restarts the ranks after a failure.
        torchrun: further options for torchrun itself, such as ["--rdzv-conf", "timeout=60"].
        share_gpu: let several NCCL ranks share a GPU, over sockets, to see NCCL's own errors on one GPU; slow.
        expect_replicas: False if the ranks' DDP models are meant to end with different parameters; see `Run.replicas`.

    Raises:
        LaunchError: the job cannot be started as asked; nothing was started.
        JobFailed: with `check=True`, the job did not pass.
    """
    if unknown:
        raise LaunchError(_about_unknown(next(iter(unknown))))
    options = checked_options(
        nproc=nproc,
        nnodes=nnodes,
        slurm=slurm,
        backend=backend,
        env=env or {},
        timeout=timeout,
        stall=stall,
        stop_on_stall=stop_on_stall,
        max_restarts=max_restarts,
        torchrun=torchrun,
        name=name,
        reveal=reveal,
        warm=warm,
        share_gpu=share_gpu,
        expect_replicas=expect_replicas,
    )
    refuse_inside_a_rank()
    run = start(resolve(target, args, kwargs or {}), options, wait=wait, show=show)
    return run.check() if check and wait else run


def _about_unknown(name: str) -> str:
    known = list(inspect.signature(launch).parameters)[:-1]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}=?" if near else "a function's own arguments go in args= and kwargs=."
    return f"launch: there is no option {name}=; {hint}"


def warm_up() -> None:
    """Start importing torch in the background, so that the first launch is fast; `%load_ext ddpkit` calls this."""
    zygote.begin(_base_environment())


def start(
    target: Target, options: Options, wait: bool = True, show: bool | str | Sink | None = None, patient: bool = False
) -> Run:
    """Start `target`; with `wait`, return when the job has ended. Called by `launch`, the cell magic and the bench.

    With `wait` or `patient`, the job waits until the zygote has finished its imports, instead of starting cold.
    """
    env = _environment(target, options)
    backend = decided_backend(options, env)
    env[wire.ENV_BACKEND] = backend
    shared = sharing(options, env)
    env |= shared.settings
    sink = notebook.sink_for(show)
    folder = new_run_folder(options.name or target.name)
    program, *rest = target.write(folder)
    command = _torchrun([program, *rest], options, folder.name)
    script = "" if program == "-m" else program
    spec = described(target, options, command, env, backend, shared) | {"program": script}
    wire.write_record(folder / wire.JOB, spec)
    env |= {wire.ENV_RUN: str(folder)} | ({} if options.expect_replicas else {wire.ENV_REPLICAS: "0"})
    env |= _torchrun_settings(folder, _shutdown_timeout(options, env))
    job: Job
    if options.slurm:
        job = start_on_slurm(folder, spec, [program, *rest], _of_torchrun(options), options.slurm, env)
        progress: Progress = FarProgress(folder)
        spec |= {"slurm": job.number, "command": job.plain_command}
    else:
        # The folder that Python puts first in sys.path in the ranks.
        imports = [os.path.dirname(script) if script else spec["cwd"]]
        cold, patience_s = _cold_because(target, options, env), zygote.PATIENCE_S if wait or patient else 0
        begin = Start(command, spec["cwd"], env, cold, imports, target.variables(), _base_environment(), patience_s)
        job, progress = LocalJob(folder, begin, gpus_of_each_agent(options, env), options.elastic), Progress()
    wire.write_record(folder / wire.JOB, {**spec, "cold_because": job.cold_because})
    run = Run(folder, job, options.reveal)
    limits = Limits(options.timeout_s, options.stall_s, options.stop_on_stall)
    sink.begin(run, lambda: job.stop("stopped"))
    if sink is not show:
        notebook.show_live(sink)
    Watcher(run, job, sink, limits, progress).start()
    if wait:
        job.wait()
        notebook.show_ended(run, sink)
    return run


def refuse_inside_a_rank() -> None:
    """Raise `LaunchError` if called from a rank, because every rank would start a job."""
    if wire.ENV_RUN in os.environ and "RANK" in os.environ:
        raise LaunchError(
            f"launch: called inside rank {os.environ['RANK']} of a running job, where every rank would start a job of its own; "
            'call it from the notebook, or guard the call with `if __name__ == "__main__"` in a file that ranks import.'
        )


def _torchrun(target: Sequence[str], options: Options, run_id: str) -> list[str]:
    """The plain torchrun command line; ddpkit sets logs and its recorder through environment variables."""
    replacing = [o for o in options.torchrun if not (len(options.nodes) > 1 and o.startswith("--rdzv-conf"))]
    own_rendezvous = any(o.startswith(("--rdzv", "--master", "--nnodes", "--node-rank")) for o in replacing)
    # As with the command `torchrun`, no file of the current folder gets in the way of one that torchrun imports.
    command = [sys.executable, "-P", "-m", "torch.distributed.run"]
    if options.slurm:
        return [*command, "--nnodes", str(options.slurm.nodes), *_of_torchrun(options), *target]
    if len(options.nodes) > 1:
        command += ["--nnodes", str(options.nnodes)]
    if not own_rendezvous and len(options.nodes) == 1:
        command += ["--standalone"]
    elif not own_rendezvous:
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", run_id]
    return [*command, *_of_torchrun(options), *target]


def _of_torchrun(options: Options) -> list[str]:
    """The options of torchrun that do not tell how its agents meet."""
    restarts = ["--max-restarts", str(options.max_restarts)] if options.max_restarts else []
    return ["--nproc-per-node", str(options.nproc), *restarts, *options.torchrun]


def _torchrun_settings(folder: Path, shutdown_timeout: str) -> dict[str, str]:
    asked = {wire.ENV_SHUTDOWN: shutdown_timeout} if shutdown_timeout else {}
    return asked | {
        "PYTHON_EXEC": str(folder / wire.RANK_PYTHON),
        "PET_REDIRECTS": "3",
        "PET_MONITOR_INTERVAL": "0.05",
    }


def _shutdown_timeout(options: Options, env: Mapping[str, str]) -> str:
    """The value of torchrun's option --shutdown-timeout, which the ranks' keepers have to know; "" if it is not given."""
    return value_of(options.torchrun, "shutdown-timeout", env.get("PET_SHUTDOWN_TIMEOUT", ""))


def _base_environment() -> dict[str, str]:
    """This process's environment without the variables that only concern a notebook."""
    env = {k: v for k, v in os.environ.items() if k not in _NOTEBOOK_ONLY and not k.startswith("PET_")}
    if "matplotlib_inline" in env.get("MPLBACKEND", ""):
        del env["MPLBACKEND"]
    return env


def _cold_because(target: Target, options: Options, env: Mapping[str, str]) -> str:
    """The reason why this job must not start warm; "" if it may."""
    if not options.warm:
        return "warm=False"
    if target.orders_by_hash(env):
        return "it iterates over a set or calls hash(), and forked ranks would all use the same order"
    return ""


def _environment(target: Target, options: Options) -> dict[str, str]:
    env = _base_environment()
    if target.path_folder:
        env["PYTHONPATH"] = os.pathsep.join(p for p in (target.path_folder, env.get("PYTHONPATH")) if p)
    for key, value in options.env.items():
        if value is None:
            env.pop(key, None)
        else:
            env[key] = str(value)
    return env
