"""Rank 0 alone asks for the whole state of a sharded model, and has no shard but its own."""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddpkit.rank import setup

with setup() as here:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device)
    fully_shard(net, mesh=init_device_mesh(here.device.type, (here.world_size,)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    inputs, targets = torch.randn(6, 8, 16).to(here.device), torch.randn(6, 8, 1).to(here.device)
    for step in range(6):
        x = inputs[step].chunk(here.world_size)[here.rank]
        y = targets[step].chunk(here.world_size)[here.rank]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
        if step == 2 and here.rank == 0:
            whole = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            file = io.BytesIO()
            torch.save(whole, file)
            print(f"saved {len(whole)} tensors")
        dist.barrier()
