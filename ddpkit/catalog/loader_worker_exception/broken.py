"""A record of rank 1 cannot be read."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddpkit.rank import setup


def read(i):
    """A record as text. One was written with decimal commas."""
    values = torch.randn(16, generator=torch.Generator().manual_seed(i)).tolist()
    text = " ".join(f"{v:.4f}" for v in values)
    return text.replace(".", ",") if i == 21 else text


class Records(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        x = torch.tensor([float(word) for word in read(i).split()])
        return x, x[:4].sum().reshape(1)


with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(16, 1).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = Records()
    sampler = DistributedSampler(data, here.world_size, here.rank, shuffle=False)
    loader = DataLoader(data, 8 // here.world_size, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x.to(here.device)), y.to(here.device))
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
