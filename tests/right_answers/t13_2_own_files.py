"""Another right answer to exercise 13.2: a file for each rank and step, and the newest step that every rank has."""

import os
from pathlib import Path

import torch
from torch import nn


def answer(ddp, optimizer, schedule, loader, here, folder, steps):
    parts = {"weights": ddp.module, "optimizer": optimizer, "schedule": schedule, "data": loader}
    kept = [{int(p.stem) for p in Path(folder).glob(f"*.{rank}")} for rank in range(here.world_size)]
    step = max(set.intersection(*kept), default=0)
    if step:
        state = torch.load(f"{folder}/{step}.{here.rank}")
        torch.set_rng_state(state.pop("random"))
        for name, part in parts.items():
            part.load_state_dict(state[name])
    while step < steps:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % 2 == 0:
                state = {name: part.state_dict() for name, part in parts.items()}
                path = f"{folder}/{step}.{here.rank}"
                torch.save({**state, "random": torch.get_rng_state()}, f"{path}.part")
                os.replace(f"{path}.part", path)
            if step == steps:
                break
