"""Step 2 by plain torchrun, without ddpkit: what NCCL and torch say by themselves, as two hosts, as one, with four ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from failures import read_dumps, shared
from step import PROGRAMS, WATCHDOG, Step, main, needs_gpu, told, torchrun

import ddpkit

# What tells of the end of a job, in the order in which a reader looks for it.
TELLING = ("Watchdog caught", "raised the following async exception", "message truncated", "Last error", "Error:")
# One host: a newer NCCL in place of torch's own, told that two ranks may have one GPU.
ONE_HOST = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}
MORE_FOR_ONE_HOST: tuple[dict[str, str], ...] = (
    {},
    {"NCCL_CUMEM_ENABLE": "0"},
    {"NCCL_CUMEM_ENABLE": "0", "NCCL_P2P_DISABLE": "1"},
)
# With more than two ranks the ring alone is quick over sockets.
FOUR_RANKS = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
LIBRARY = "GPU_DAY_NCCL"


def job(
    step: Step, case: str, name: str, env: Mapping[str, str], ranks: int = 2, limit_s: float = 50
) -> tuple[int, str]:
    """Run a case of programs/pair.py, and keep its log under `name`."""
    dumps = {"TORCH_FR_DUMP_TEMP_FILE": str(step.folder / "trace_"), "TIMEOUT_S": str(step.timeout_s)}
    code, text = torchrun(
        step, ranks, str(PROGRAMS / "pair.py"), case, env={**dumps, **WATCHDOG, **env}, limit_s=limit_s
    )
    step.log(name, text)
    return code, text


def seen(step: Step, name: str, code: int, text: str) -> None:
    """The line that tells of the end, and what ddpkit makes of the log."""
    found = ddpkit.diagnose(step.folder / f"{name}.log")
    step.see(
        f"exit code {code}; ddpkit diagnose: {found.name}, rank {found.rank}; {told(text, *TELLING)}", exitcode=code
    )


def as_two_hosts(case: str, **env: str) -> Callable[[Step], None]:
    """The step that runs `case` with each rank a host of its own."""

    def run(step: Step) -> None:
        code, text = job(step, case, step.name, {**shared(step), **env})
        seen(step, step.name, code, text)
        if not step.dry and case in ("skipped", "raises"):
            read_dumps(step)

    return run


def plain_sizes(step: Step) -> None:
    """Few elements, then many: NCCL sends them in other ways."""
    said = []
    for case in ("sizes", "large_sizes"):
        code, text = job(step, case, f"plain_{case}", shared(step), limit_s=28)
        said.append(f"{case}: exit code {code}, {told(text, *TELLING, 'the sum is')}")
    step.see("; ".join(said))


@needs_gpu
def all_defaults(step: Step) -> None:
    """How long it takes where nobody has set the waiting times: torch's watchdog goes on for a minute."""
    unset = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "15000", "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "1"}
    seen(step, step.name, *job(step, "skipped", step.name, {**shared(step), **unset}, limit_s=100))


def four_ranks(step: Step) -> None:
    """Two more ranks on the same GPU."""
    env = {**shared(step), **({} if step.dry else FOUR_RANKS)}
    code, text = job(step, "healthy", "four_healthy", env, ranks=4, limit_s=40)
    figures = told(text, "all_reduce_ms")
    code, text = job(step, "skipped", "four_skipped", env, ranks=4, limit_s=45)
    seen(step, "four_skipped", code, text)
    step.see(f"healthy: {figures or 'no'}; skipped: exit code {code}, {told(text, *TELLING)}", healthy=figures)


@needs_gpu
def host_healthy(step: Step) -> None:
    """Whether the newer NCCL takes two ranks of one host, and by which settings; the other steps go by that."""
    for more in MORE_FOR_ONE_HOST:
        env = {"NCCL_DEBUG": "VERSION", "LD_PRELOAD": os.environ[LIBRARY], **ONE_HOST, **more}
        code, text = job(step, "healthy", "one_host_healthy", env, limit_s=18)
        if code == 0:
            break
    words = " ".join(f"{name}={value}" for name, value in more.items()) or "nothing more"
    version, figures = told(text, "NCCL version"), told(text, "all_reduce_ms")
    step.see(f"exit code {code}, with {words}; {version}; {figures}", exitcode=code, settings=more)


def as_one_host(case: str) -> Callable[[Step], None]:
    """The step that runs `case` with all ranks on one host, as a machine with more GPUs has them."""

    def run(step: Step) -> None:
        env = {"LD_PRELOAD": os.environ[LIBRARY], **ONE_HOST}
        name = step.name.replace("host_", "one_host_")
        seen(step, name, *job(step, case, name, env, limit_s=45))

    return needs_gpu(run)


plain_skipped = as_two_hosts("skipped")
plain_killed = as_two_hosts("killed")
plain_raises = as_two_hosts("raises")
desync_debug = needs_gpu(as_two_hosts("skipped", TORCH_NCCL_DESYNC_DEBUG="1"))
debug_detail = needs_gpu(as_two_hosts("skipped", TORCH_DISTRIBUTED_DEBUG="DETAIL"))
host_skipped = as_one_host("skipped")
host_killed = as_one_host("killed")
host_sizes = as_one_host("sizes")

if __name__ == "__main__":
    main(globals())
