"""A wrong answer to exercise 08.2: each rank decides by its own GPU."""


def answer(store, rank, ranks, has_gpu):
    return "nccl" if has_gpu else "gloo"
