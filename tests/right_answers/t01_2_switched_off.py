"""A right answer to 01.2: a list that holds the tracker as long as it works."""

import torch.distributed as dist


def answer(connect):
    works = []

    def log(**values):
        if works:
            attempt(works[0].log, **values)

    def attempt(does, **values):
        try:
            return does(**values)
        except Exception as error:
            works.clear()
            print(f"not tracked: {error}")

    if dist.get_rank() == 0:
        works += filter(None, [attempt(connect)])
    return log
