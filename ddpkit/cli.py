"""The `ddpkit` command: one function for each of its commands."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .diagnosis.pages import NoSuchPage, Page
from .diagnosis.pages import explain as look_up
from .errors import LaunchError, LogError
from .launcher.launcher import launch
from .launcher.options import EXIT_CODES
from .launcher.script_command import path_or_module, script
from .launcher.smoke_command import smoke
from .launcher.train_command import CONTEXT, train
from .processes.running_jobs import NoSuchJob

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Run torchrun jobs, and find out why they fail or hang."
)


@app.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
def run(
    target: Annotated[str, typer.Argument(help="A script's path, or with -m a module's name.")],
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    nproc: Annotated[
        str, typer.Option("--nproc-per-node", "-n", help="Ranks to start: a number, cpu, gpu, auto.")
    ] = "2",
    nnodes: Annotated[str, typer.Option(help="Agents on this machine, as if each were a host; 1:2 is elastic.")] = "1",
    backend: Annotated[str | None, typer.Option(help="gloo or nccl, for ddpkit.rank.setup().")] = None,
    timeout: Annotated[float | None, typer.Option(help="End the job after this many seconds.")] = None,
    stall: Annotated[
        float, typer.Option(help="Collect the ranks' stacks after this many seconds without progress.")
    ] = 10.0,
    stop_on_stall: Annotated[bool, typer.Option("--stop-on-stall", help="End the job at the first stall.")] = False,
    max_restarts: Annotated[int, typer.Option(help="How often torchrun restarts the ranks.")] = 0,
    module: Annotated[bool, typer.Option("--module", "-m", help="The target is a module.")] = False,
    name: Annotated[str | None, typer.Option(help="The run's name.")] = None,
    warm: Annotated[bool, typer.Option(help="Fork the job from a process that has already imported torch.")] = True,
    share_gpu: Annotated[
        bool, typer.Option("--share-gpu", help="Let several NCCL ranks share a GPU, over sockets.")
    ] = False,
) -> None:
    """Start TARGET as a torchrun job on this machine, stream each rank's output, and report what happened.

    Exit code: 0 passed, 1 failed, 124 timed out or hung, 130 stopped, 2 not started.
    """
    ended = launch(
        path_or_module(target, module),
        args=args or (),
        nproc=nproc,
        nnodes=nnodes,
        backend=backend,
        timeout=timeout,
        stall=stall,
        stop_on_stall=stop_on_stall,
        max_restarts=max_restarts,
        name=name,
        warm=warm,
        share_gpu=share_gpu,
    )
    raise typer.Exit(EXIT_CODES.get(ended.state, 1))


app.command(context_settings=CONTEXT)(train)
app.command()(smoke)
app.command(context_settings={"allow_interspersed_args": False})(script)


@app.command()
def diagnose(
    logs: Annotated[
        list[str], typer.Argument(help="Files, patterns, folders (of a run, or torchrun's --log-dir), or - for stdin.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON.")] = False,
) -> None:
    """Name the failure in LOGS of any launcher: which rank, which line shows it, which errors are consequences.

    Exit code: 0 healthy, 1 a failure, known or not, 2 nothing to read, 3 neither a known failure nor a good end.
    """
    from .diagnosis.log.conclusion import diagnose as of
    from .diagnosis.run import HEALTHY, UNKNOWN

    found = of(*logs)
    print(found.json() if as_json else found)
    raise typer.Exit(0 if found.name == HEALTHY else 3 if found.name == UNKNOWN and not found.evidence else 1)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the lines as JSON.")] = False) -> None:
    """Check this machine before a job. Exit code: 0 nothing would break a job, 1 something would."""
    from .machine.examination import doctor as examine

    report = examine()
    print(report.json() if as_json else report)
    raise typer.Exit(1 if report.problems else 0)


@app.command()
def look(
    pid: Annotated[int | None, typer.Argument(help="The PID of the job's torchrun or of one of its ranks.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was seen as JSON.")] = False,
) -> None:
    """Look at a running torchrun job, whoever started it: stacks, CPU, memory, and which rank the others wait for.

    Without PID: your only torchrun job on this host. The job is only read.

    Exit code: 0 looked, 1 no such job or its stacks may not be read, 2 several jobs: name one.
    """
    from .watcher.other_job import look_at

    seen = look_at(pid)
    print(seen.json() if as_json else seen)
    raise typer.Exit(1 if seen.unread else 0)


@app.command()
def explain(
    name: Annotated[str | None, typer.Argument(help="A failure of the catalog; without it, the list of all.")] = None,
) -> None:
    """Print the page on failure NAME: what it means, why it happens, how to fix it. Exit code 2: no such failure."""
    found = look_up(name)
    if not isinstance(found, Page):
        print(found)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(highlight=False, markup=False, emoji=False)
    console.print(found.title, style="bold")
    console.print(f"{found.name} · seen with: {found.seen_with}\n", style="dim")
    console.print(Markdown(f"{found.text}\n{found.links}"))


@app.command()
def start(number: Annotated[str, typer.Argument(help="The lesson's number, such as 02; all without it.")] = "") -> None:
    """Copy a lesson and its exercise into work/, without outputs. An existing copy stays: updates never touch it."""
    from .course.student import start as copy_lessons

    for path in copy_lessons(number):
        print(path)


@app.command()
def progress() -> None:
    """Show your progress in the exercises, as recorded in this folder's .ddpkit."""
    from .course.exercises import progress as done

    print(done())


def main() -> None:
    """The console script: a bad request prints one sentence to stderr and exits with code 2."""
    try:
        app()
    except (LaunchError, LogError, NoSuchJob, NoSuchPage) as error:
        print(f"ddpkit: {error}", file=sys.stderr)
        sys.exit(1 if type(error) is NoSuchJob else 2)
