"""`%%torchrun`: runs the cell's text as a script with torchrun's own options; `--as NAME` binds the `Run`."""

from __future__ import annotations

import argparse
import difflib
import shlex
from typing import Any, NoReturn

from ddpkit.errors import LaunchError

from .launcher import refuse_inside_a_rank, start, warm_up
from .options import checked_options
from .target import of_text

# torchrun's options that are passed through, besides --standalone.
PASSED_THROUGH = (
    "node-rank master-addr master-port local-addr rdzv-backend rdzv-endpoint rdzv-id rdzv-conf "
    "role monitor-interval start-method local-ranks-filter numa-binding shutdown-timeout"
).split()
KEPT_BY_DDPKIT = ("log-dir", "redirects", "tee", "no-python", "run-path", "module", "logs-specs")

# Parsed names that are not options of the job.
OF_THE_MAGIC = ("bind", "args", "check", "quiet", "text", "wait")


class MagicParser(argparse.ArgumentParser):
    """Parses the magic's line; a mistake raises `LaunchError` instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"%%torchrun: {message}.")


def parser() -> MagicParser:
    """The options of `%%torchrun`: those of `launch`, and torchrun's own, with hyphens or underscores."""
    p = MagicParser(prog="%%torchrun", add_help=False, allow_abbrev=False)
    _add(p, "nproc-per-node", dest="nproc", default="2")
    _add(p, "nnodes")
    _add(p, "max-restarts", type=int, default=0)
    p.add_argument("--as", dest="bind")
    p.add_argument("--backend")
    p.add_argument("--env", action="append", default=[])
    p.add_argument("--timeout", type=float)
    p.add_argument("--stall", type=float, default=10.0)
    for flag in ("stop-on-stall", "share-gpu", "check", "quiet", "text"):
        p.add_argument(f"--{flag}", action="store_true")
    for flag in ("wait", "warm", "reveal", "expect-replicas"):
        p.add_argument(f"--no-{flag}", dest=flag.replace("-", "_"), action="store_false")
    p.add_argument("--standalone", dest="torchrun", action="append_const", const="--standalone", default=[])
    for name in PASSED_THROUGH:
        _add(p, name, dest="torchrun", action="append", type=f"--{name}={{}}".format)
    p.add_argument("args", nargs="*")
    return p


def _add(p: argparse.ArgumentParser, name: str, **settings: Any) -> None:
    p.add_argument(f"--{name}", *([f"--{name.replace('-', '_')}"] if "-" in name else []), **settings)


def torchrun(line: str, cell: str, namespace: dict[str, Any]) -> None:
    """Run `cell` as a torchrun script with the options in `line`; bind the run in `namespace`, by default as `_run`."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise LaunchError(f"%%torchrun: the line cannot be read ({error}): {line}") from None
    asked, unknown = parser().parse_known_args(words)
    if unknown:
        raise LaunchError(_about_unknown(unknown[0].split("=")[0]))
    if asked.bind and not asked.bind.isidentifier():
        raise LaunchError(f"%%torchrun: --as {asked.bind} is not a variable name.")
    refuse_inside_a_rank()
    given = {name: value for name, value in vars(asked).items() if name not in OF_THE_MAGIC}
    given |= _agents(given.pop("nnodes"), asked.torchrun)
    options = checked_options(**given | {"env": dict(map(_pair, asked.env))})
    # The magic's own line is line 1 of the cell, so line numbers in tracebacks match the cell.
    target = of_text("\n" + cell, asked.bind or "cell", asked.args, "%%torchrun", "the cell")
    show: bool | str | None = False if asked.quiet else "text" if asked.text else None
    run = start(target, options, wait=asked.wait, show=show)
    namespace[asked.bind or "_run"] = run
    if asked.check and asked.wait:
        run.check()


def _about_unknown(option: str) -> str:
    if option.lstrip("-").replace("_", "-") in KEPT_BY_DDPKIT:
        return f"%%torchrun: {option} cannot be given here: ddpkit keeps the logs and the script; see run.folder."
    known = [each for action in parser()._actions for each in action.option_strings]
    near = difflib.get_close_matches(option, known, n=1, cutoff=0.75)
    hint = f"did you mean {near[0]}?" if near else "the script's own options go after --."
    return f"%%torchrun: there is no option {option}; {hint}"


def _agents(nnodes: str | None, torchrun: list[str]) -> dict[str, Any]:
    """As options of `launch`: every agent runs here, or only this one if others can find the rendezvous by its address."""
    if nnodes and any(option.startswith(("--rdzv-endpoint", "--master-addr", "--node-rank")) for option in torchrun):
        return {"torchrun": [f"--nnodes={nnodes}", *torchrun]}
    return {"nnodes": nnodes or 1}


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise LaunchError(f"%%torchrun: --env {text} is not KEY=VALUE.")
    return key, value


def load_ipython_extension(shell: Any) -> None:
    """Register `%%torchrun` with `shell`, and start importing torch so that the first launch can be warm."""
    warm_up()
    shell.register_magic_function(lambda line, cell: torchrun(line, cell, shell.user_ns), "cell", "torchrun")
