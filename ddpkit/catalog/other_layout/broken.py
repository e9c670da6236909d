"""The file has other names for its parts than the loader asks for."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup


def save(path, model, optimizer, epoch):
    torch.save({"epoch": epoch, "model_state": model.state_dict(), "optimizer_state": optimizer.state_dict()}, path)


def load(path, model, device):
    held = torch.load(path, map_location=device)
    model.load_state_dict(held["model_state_dict"])
    return held["epoch"] + 1


with setup() as here, tempfile.TemporaryDirectory() as own:
    torch.manual_seed(0)
    path = Path(own, "last.pt")
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device)
    save(path, net, torch.optim.SGD(net.parameters(), lr=0.1), epoch=2)

    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(here.device)
    first = load(path, net, here.device)
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs, targets = torch.randn(6, 8, 16).to(here.device), torch.randn(6, 8, 1).to(here.device)
    for epoch in range(first, 6):
        x = inputs[epoch].chunk(here.world_size)[here.rank]
        y = targets[epoch].chunk(here.world_size)[here.rank]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.2f}")
