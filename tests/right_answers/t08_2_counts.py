"""Another right answer to exercise 08.2: the ranks with a GPU are counted, and the last to arrive says the number."""


def answer(store, rank, ranks, has_gpu):
    store.add("with", int(has_gpu))
    if store.add("here", 1) == ranks:
        store.set("all", str(store.add("with", 0)))
    return "nccl" if int(store.get("all")) == ranks else "gloo"
