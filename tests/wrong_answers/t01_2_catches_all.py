"""A wrong answer to 01.2: Ctrl-C is caught, too."""

import torch.distributed as dist


def answer(connect):
    tracker = None
    try:
        if dist.get_rank() == 0:
            tracker = connect()
    except BaseException:
        print("not tracked")

    def log(**values):
        nonlocal tracker
        try:
            if tracker:
                tracker.log(**values)
        except BaseException:
            tracker = None

    return log
