from torch import nn


def answer(ddp, optimizer, x, y):
    optimizer.zero_grad()
    try:
        nn.functional.mse_loss(ddp(x), y).backward()
    except RuntimeError as error:
        print("skipped:", error)
        return
    optimizer.step()
