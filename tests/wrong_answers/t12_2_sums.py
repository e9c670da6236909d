"""Weighs by the share of the batch, and forgets that DDP takes the mean over ranks."""


def answer(batch, rank, ranks):
    mine = batch.tensor_split(ranks)[rank]
    return mine, len(mine) / len(batch)
