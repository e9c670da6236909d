"""Each batch is sorted by length and cut in two, so rank 1 always has the long texts."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence

from ddpkit.rank import CommProfiler, report, setup


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(100, 32), nn.GRU(32, 64, batch_first=True), nn.Linear(64, 1)

    def forward(self, texts):
        states, _ = self.cell(self.words(pad_sequence(texts, batch_first=True)))
        return self.head(torch.stack([states[i, : len(text)].mean(0) for i, text in enumerate(texts)]))


with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(Reader().to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with CommProfiler(ddp) as comm:
        for _step in range(22):
            lengths = [*torch.randint(5, 20, (4,)).tolist(), *torch.randint(200, 300, (4,)).tolist()]
            batch = [torch.randint(100, (length,)) for length in lengths]
            batch.sort(key=len)
            share = len(batch) // here.world_size
            texts = [text.to(here.device) for text in batch[here.rank * share :][:share]]
            targets = torch.tensor([[text.float().mean() / 50] for text in texts], device=here.device)
            loss = nn.functional.mse_loss(ddp(texts), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    told = comm.stats()
    if here.rank == 0:
        print(comm.table())
    report(comm=told, wasted=max(rank["waited_ms"] for rank in told["ranks"]) / told["step_ms"])
