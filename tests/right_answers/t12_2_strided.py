"""Every ranks-th sample, with a weight for parts of other lengths."""


def answer(batch, rank, ranks):
    mine = batch[rank::ranks]
    return mine, len(mine) * ranks / len(batch)
