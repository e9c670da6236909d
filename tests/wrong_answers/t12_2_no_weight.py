"""Each part counts the same, whatever its length."""


def answer(batch, rank, ranks):
    return batch.tensor_split(ranks)[rank], 1.0
