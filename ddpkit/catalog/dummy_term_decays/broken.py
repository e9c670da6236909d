"""A dummy term keeps DDP content, and AdamW decays the unused layer."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import report, setup


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.head = nn.Linear(32, 1)
        self.spare = nn.Linear(32, 1)  # trained in a later phase

    def forward(self, x):
        return self.head(self.body(x).relu())


with setup() as here:
    torch.manual_seed(0)
    net = Net().to(here.device)
    before = net.spare.weight.detach().clone()
    ddp = DDP(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    inputs, targets = torch.randn(8, 8, 16), torch.randn(8, 8, 1)
    for step in range(8):
        x = inputs[step].chunk(here.world_size)[here.rank].to(here.device)
        y = targets[step].chunk(here.world_size)[here.rank].to(here.device)
        dummy = 0 * sum(p.sum() for p in net.spare.parameters())
        loss = nn.functional.mse_loss(ddp(x), y) + dummy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    moved = (net.spare.weight - before).abs().max().item()
    print(f"the spare layer has moved by {moved:.1g}")
    report(moved=moved)
