"""Workers are spawned from a script without a main guard."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddpkit.rank import setup


class Samples(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return x, x[:4].sum().reshape(1)


data = Samples()
peek = DataLoader(data, batch_size=8, num_workers=1, multiprocessing_context="spawn")
width = next(iter(peek))[0].shape[1]

with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(width, 1).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    sampler = DistributedSampler(data, here.world_size, here.rank, shuffle=False)
    for step, (x, y) in enumerate(DataLoader(data, batch_size=8 // here.world_size, sampler=sampler)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x.to(here.device)), y.to(here.device))
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
