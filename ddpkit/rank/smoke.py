"""`python -m ddpkit.rank.smoke`: the smallest communication test, in six steps and without training code.

It runs under torchrun, under `ddpkit.launch("ddpkit.rank.smoke")`, and as one process, without communication. torch is
imported in step 2, so that a torch that cannot be imported fails there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from ddpkit.rank.joining import environment

if TYPE_CHECKING:
    from ddpkit.rank.joining.process_group import Here

# Where to look when a step fails.
ADVICE = {
    1: "Before init: a matter of the environment. Start it with torchrun, and remove lines that set its variables again.",
    2: "Before init: a matter of the environment. See that this is the torch that you installed: `ddpkit doctor`.",
    3: "During init: a matter of the network, of NCCL, or of what the ranks were told. Try --backend gloo: where that "
    "passes, it is NCCL (NCCL_DEBUG=INFO says more); where it fails too, it is the network or the environment.",
    4: "After init: a matter of the device. See `nvidia-smi`, CUDA_VISIBLE_DEVICES and LOCAL_RANK.",
    5: "After init: a matter of the device, or of the way between devices. Try --backend gloo, then NCCL_DEBUG=INFO.",
    6: "After init: a rank did not come to the barrier. Look at the output of the others.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the six steps and return 0; what a step raises comes through, and a line on stderr names the step."""
    parser = argparse.ArgumentParser(prog="python -m ddpkit.rank.smoke", description="A minimal communication test.")
    parser.add_argument("--backend", help="gloo or nccl; by default nccl where every rank has a GPU of its own")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="how long to wait for the other ranks")
    asked = parser.parse_args(argv)
    with _step(1):
        place = environment.place()
    said(1, f"variables: {environment.described(place)}")
    with _step(2):
        from ddpkit.rank.joining.process_group import setup

        said(2, f"versions: {environment.versions()}; {environment.devices()}")
    with ExitStack() as up:
        with _step(3):
            here = up.enter_context(setup(asked.backend, asked.timeout))
        said(3, f"init: {here.backend}, {here.world_size} rank{'s' if here.world_size > 1 else ''}")
        _communicate(here)
        with _step(6):
            up.close()
    said(6, "barrier and destroy: done, all steps passed")
    return 0


def _communicate(here: Here) -> None:
    """Steps 4 and 5, and the barrier of step 6."""
    import torch
    import torch.distributed as dist

    with _step(4):
        ids = torch.tensor([float(here.rank)], device=here.device)
    said(4, f"device: {ids.device}")
    with _step(5):
        dist.all_reduce(ids)
        got, expected = ids.item(), here.world_size * (here.world_size - 1) / 2
        if got != expected:
            raise RuntimeError(f"smoke: all-reduce of the ranks' ids gave {got:g}, not {expected:g}.")
    said(5, f"all-reduce: got {got:g}, expected {expected:g}")
    with _step(6):
        dist.barrier()


def said(number: int, text: str) -> None:
    """Print a step's line on rank 0."""
    if environment.rank() == 0:
        print(f"[{number}/6] {text}", flush=True)


@contextmanager
def _step(number: int) -> Iterator[None]:
    """Around the work of a step: an exception is printed with the step's number and advice."""
    try:
        yield
    except Exception as error:
        print(f"[{number}/6] failed on rank {environment.rank()}: {type(error).__name__}: {error}", file=sys.stderr)
        print(f"[{number}/6] {ADVICE[number]}", file=sys.stderr, flush=True)
        raise


if __name__ == "__main__":
    sys.exit(main())
