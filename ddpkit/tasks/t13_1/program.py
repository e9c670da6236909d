"""The program of exercise 13.1: a job that was started again."""

import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

with setup() as here:
    seed = int(os.environ.get("DDPKIT_SEED", "0"))
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    inputs = torch.randn(48, 8, 6)
    targets = inputs.sum(2, keepdim=True)
    path, first = Path(__file__).with_suffix(".pt"), 0
    if path.exists():
        saved = torch.load(path)
        net.load_state_dict(saved["weights"])
        first = saved["step"]
    ddp = DDP(net.to(here.device))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.02)
    # This machine is not well: in some step of the first attempt it takes a process away.
    ill = torch.randint(20, 40, (), generator=torch.Generator().manual_seed(13)).item()
    taken = here.rank == seed % here.world_size and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for step in range(first, 48):
        if taken and step == ill:
            os.kill(os.getpid(), signal.SIGKILL)
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.6f}")
        if (step + 1) % 7 == 0 and here.rank == 0:
            torch.save({"step": step + 1, "weights": net.state_dict()}, f"{path}.part")
            os.replace(f"{path}.part", path)
