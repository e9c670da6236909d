"""DDP under torch.compile; with `--break`, rank 1 gets a batch of another width in step 2, and its compiled graph refuses it."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1))
model = DDP(torch.compile(net))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

for step in range(4):
    width = 7 if "--break" in sys.argv and rank == 1 and step == 2 else 8
    x = torch.randn(4, width)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"rank {rank}, step {step}: loss {loss.item():.3f}", flush=True)

dist.destroy_process_group()
