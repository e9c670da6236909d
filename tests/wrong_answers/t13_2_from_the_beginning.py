"""A wrong answer to exercise 13.2: it saves nothing, so that every attempt takes all steps again."""

from torch import nn


def answer(ddp, optimizer, schedule, loader, here, folder, steps):
    step = 0
    while step < steps:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step == steps:
                break
