"""The dataset holds a lambda, and its workers are spawned."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddpkit.rank import setup


class Samples(Dataset):
    def __init__(self):
        self.scale = lambda x: 2 * x

    def __len__(self):
        return 48

    def __getitem__(self, i):
        x = self.scale(torch.randn(16, generator=torch.Generator().manual_seed(i)))
        return x, x[:4].sum().reshape(1)


def main():
    with setup() as here:
        torch.manual_seed(0)
        ddp = DDP(nn.Linear(16, 1).to(here.device))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.03)
        data = Samples()
        sampler = DistributedSampler(data, here.world_size, here.rank, shuffle=False)
        loader = DataLoader(data, 8 // here.world_size, sampler=sampler, num_workers=1, multiprocessing_context="spawn")
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(ddp(x.to(here.device)), y.to(here.device))
            loss.backward()
            optimizer.step()
            print(f"step {step}: loss {loss.item():.2f}")


if __name__ == "__main__":
    main()
