"""A wrong answer to exercise 08.2: a store that is gone becomes a fallback."""


def answer(store, rank, ranks, has_gpu):
    try:
        store.set(f"gpu {rank}", str(has_gpu))
        return "nccl" if all(store.get(f"gpu {other}") == b"True" for other in range(ranks)) else "gloo"
    except Exception:
        return "gloo"
