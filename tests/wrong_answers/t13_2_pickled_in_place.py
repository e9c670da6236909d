"""A wrong answer to exercise 13.2: each save writes over the one before, past torch.save, where the second kill waits."""

import os
import pickle

import torch
from torch import nn


def answer(ddp, optimizer, schedule, loader, here, folder, steps):
    parts = {"weights": ddp.module, "optimizer": optimizer, "schedule": schedule, "data": loader}
    path, step = f"{folder}/{here.rank}", 0
    if os.path.exists(path):
        with open(path, "rb") as file:
            step, random, states = pickle.load(file)
        torch.set_rng_state(random)
        for name, part in parts.items():
            part.load_state_dict(states[name])
    while step < steps:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % 4 == 0:
                with open(path, "wb") as file:
                    pickle.dump((step, torch.get_rng_state(), {n: p.state_dict() for n, p in parts.items()}), file)
            if step == steps:
                break
