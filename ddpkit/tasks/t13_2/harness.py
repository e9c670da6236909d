"""Has the answer train, kills it in a step and again in a save, and compares with a run that nothing happened to."""

import io
import math
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import safe_loader, setup

STEPS, BATCHES, MOST = 24, 10, 36


def call(answer, seed):
    attempt, run = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), Path(os.environ["DDPKIT_RUN"])
    with setup("gloo") as here:
        folder, counted = run / "kept", run / f"steps_of_rank_{here.rank}"
        folder.mkdir(exist_ok=True)
        parts = _parts(here, seed)
        last = 13 + seed % 7 if attempt == 0 and here.rank == seed % here.world_size else math.inf
        parts[0].register_forward_pre_hook(lambda *_: _count(counted, last))
        whole_save = torch.save
        if attempt == 1 and here.rank == 0:
            torch.save = _dying_save(counted, counted.stat().st_size)
        answer(*parts, here, str(folder), STEPS)
        torch.save = whole_save
        mine, taken = parts[0].module.state_dict(), counted.stat().st_size
        alone = _trained(*_parts(here, seed))
        off = max((mine[name] - value).abs().max().item() for name, value in alone.items())
        return {"off": off, "taken": taken, "attempt": attempt}


def _parts(here, seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1)).double()
    x = torch.randn(4 * BATCHES * here.world_size, 6, dtype=torch.float64)
    loader = safe_loader(
        torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 4, here=here, seed=seed, num_workers=0
    )
    ddp = DDP(net)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / STEPS))
    torch.manual_seed(seed + 1 + here.rank)
    return ddp, optimizer, schedule, loader


def _trained(ddp, optimizer, schedule, loader):
    step = 0
    while step < STEPS:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step == STEPS:
                break
    return ddp.module.state_dict()


def _count(counted, last):
    """Count a step that begins, and be killed in the one after `last`."""
    with open(counted, "ab") as file:
        file.write(b".")
    if counted.stat().st_size > last:
        _die()


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _dying_save(counted, before):
    """`torch.save`, which is killed half way as soon as this attempt has taken three steps."""
    whole_save = torch.save

    def save(state, file, *args, **kwargs):
        if counted.stat().st_size < before + 3:
            return whole_save(state, file, *args, **kwargs)
        buffer = io.BytesIO()
        whole_save(state, buffer)
        with file if hasattr(file, "write") else open(file, "wb") as half:
            half.write(buffer.getvalue()[: buffer.tell() // 2])
        _die()

    return save


def judge(returned, seed):
    ranks = returned.values()
    if any(r["attempt"] < 2 for r in ranks):
        look = "who writes the files: the kill in the middle of a save waits in torch.save on rank 0"
        return "a job that the second kill never met", "a save by torch.save, after every 4th step", look
    taken = max(r["taken"] for r in ranks)
    if taken > MOST:
        got = f"{taken} steps in three attempts, for a job of {STEPS}"
        return got, f"a save after every 4th step, and {MOST} steps at most", "from which step each attempt goes on"
    off = max(r["off"] for r in ranks)
    if not off < 1e-12:
        look = "what a step depends on besides the weights, and which of it is each rank's own"
        return f"weights {off:.2g} off", "the weights of the training that nobody killed", look
    return None
