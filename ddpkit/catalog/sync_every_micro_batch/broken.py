"""Texts are packed into micro-batches by length, so the ranks' windows differ, and every micro-batch is reduced."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

ROOM = 24  # tokens that fit into a micro-batch
LENGTHS = [  # of the texts of each step
    [6, 13, 16, 16, 5, 8, 5, 11],
    [14, 7, 7, 4, 13, 16, 13, 6],
    [7, 5, 16, 5, 16, 16, 5, 10],
    [14, 5, 12, 7, 11, 15, 7, 9],
    [8, 15, 12, 9, 7, 7, 7, 15],
]


def pack(texts):
    batches = [[]]
    for text in texts:
        if sum(map(len, batches[-1])) + len(text) > ROOM:
            batches.append([])
        batches[-1].append(text)
    return [torch.cat(batch) for batch in batches]


with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step, lengths in enumerate(LENGTHS):
        texts = torch.randn(sum(lengths), 16).to(here.device).split(lengths)
        batches = pack(texts[here.rank :: here.world_size])
        for x in batches:
            loss = nn.functional.mse_loss(ddp(x), x.sum(1, keepdim=True)) / len(batches)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: micro-batches of {[len(x) for x in batches]} tokens")
