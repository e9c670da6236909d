"""Equal parts: the samples that are left are in none."""


def answer(batch, rank, ranks):
    size = len(batch) // ranks
    return batch[rank * size : (rank + 1) * size], 1.0
