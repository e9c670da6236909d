"""A wrong answer to 01.2: only the sign-in may fail."""

import torch.distributed as dist


def answer(connect):
    tracker = None
    if dist.get_rank() == 0:
        try:
            tracker = connect()
        except Exception as error:
            print(f"not tracked: {error}")
    return tracker.log if tracker else lambda **values: None
