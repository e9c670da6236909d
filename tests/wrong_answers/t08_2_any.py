"""A wrong answer to exercise 08.2: one rank with a GPU is taken to be enough."""


def answer(store, rank, ranks, has_gpu):
    store.set(f"gpu {rank}", str(has_gpu))
    have = [store.get(f"gpu {other}") == b"True" for other in range(ranks)]
    return "nccl" if any(have) else "gloo"
