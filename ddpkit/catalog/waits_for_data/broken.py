"""Each sample parses the whole file again, so the model waits for its data."""

import json
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddpkit.rank import report, setup


class Rows(Dataset):
    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 25 * 16

    def __getitem__(self, index):
        values = torch.tensor(json.loads(self.path.read_text())[index])
        return values[:64], values[64:]


with setup() as here, tempfile.TemporaryDirectory() as folder:
    torch.manual_seed(0)
    path = Path(folder, "rows.json")
    path.write_text(json.dumps(torch.randn(25 * 16, 65).tolist()))
    data = Rows(path)
    mine = DistributedSampler(data, here.world_size, here.rank, shuffle=False)
    loader = DataLoader(data, batch_size=16 // here.world_size, sampler=mine)
    ddp = DDP(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 1)).to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    times, ended = [], time.perf_counter()
    for x, y in loader:
        torch.distributed.barrier()  # A batch that is late on one rank is a wait for all.
        asked, came = ended, time.perf_counter()
        loss = nn.functional.mse_loss(ddp(x.to(here.device)), y.to(here.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended = time.perf_counter()
        times.append((came - asked, ended - came))
    print(f"a step takes {1000 * median(map(sum, times)):.0f} ms")
    report(times=times, wasted=median(waited / (waited + worked) for waited, worked in times))
