"""A wrong answer to exercise 13.2: every rank goes on with the random states of rank 0."""

import os

import torch
from torch import nn


def answer(ddp, optimizer, schedule, loader, here, folder, steps):
    path, step = f"{folder}/kept.pt", 0
    if os.path.exists(path):
        kept = torch.load(path)
        ddp.module.load_state_dict(kept["weights"])
        optimizer.load_state_dict(kept["optimizer"])
        schedule.load_state_dict(kept["schedule"])
        loader.load_state_dict(kept["data"])
        torch.set_rng_state(kept["random"])
        step = kept["step"]
    while step < steps:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % 4 == 0 and here.rank == 0:
                kept = {
                    "step": step,
                    "weights": ddp.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(),
                    "data": loader.state_dict(),
                    "random": torch.get_rng_state(),
                }
                torch.save(kept, path + ".part")
                os.replace(path + ".part", path)
            if step == steps:
                break
