"""The model returns two outputs, and one is left out of the loss."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddpkit.rank import setup


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.price = nn.Linear(32, 1)
        self.volume = nn.Linear(32, 1)

    def forward(self, x):
        x = self.body(x).relu()
        return self.price(x), self.volume(x)


with setup() as here:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(44, 16), torch.randn(44, 1), torch.randn(44, 1))
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=8 // here.world_size, sampler=sampler)
    ddp = DDP(Net().to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step, batch in enumerate(loader):
        x, price, volume = (part.to(here.device) for part in batch)
        said_price, said_volume = ddp(x)
        loss = nn.functional.mse_loss(said_price, price)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: {len(x)} samples, loss {loss.item():.2f}")
