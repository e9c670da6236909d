"""A wrong answer to 01.2: it asks a service that is gone in every step."""

import contextlib

import torch.distributed as dist


def answer(connect):
    tracker = None
    if dist.get_rank() == 0:
        with contextlib.suppress(Exception):
            tracker = connect()

    def log(**values):
        with contextlib.suppress(Exception):
            if tracker:
                tracker.log(**values)

    return log
