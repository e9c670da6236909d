"""A wrong answer to exercise 08.2: rank 0 decides for all by its own GPU."""


def answer(store, rank, ranks, has_gpu):
    if rank == 0:
        store.set("backend", "nccl" if has_gpu else "gloo")
    return store.get("backend").decode()
