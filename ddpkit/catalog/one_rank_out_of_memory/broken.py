"""Only one rank runs out of memory."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import memory_budget, setup


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        hidden = [layer for _ in range(5) for layer in (nn.Linear(128, 128), nn.GELU())]
        self.layers = nn.Sequential(nn.Linear(32, 128), nn.GELU(), *hidden, nn.Linear(128, 1))

    def forward(self, texts):
        tokens = self.layers(torch.cat(texts))
        return torch.stack([text.mean() for text in tokens.split([len(text) for text in texts])])


with setup() as here:
    memory_budget(56)
    torch.manual_seed(0)
    ddp = DDP(Scorer().to(here.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(5):
        lengths = [100] * 4 + [3000 if step == 2 else 100] * 4
        batch, scores = [torch.randn(n, 32).to(here.device) for n in lengths], torch.randn(8).to(here.device)
        mine = slice(here.rank * 8 // here.world_size, (here.rank + 1) * 8 // here.world_size)
        x, y = batch[mine], scores[mine]
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: {sum(map(len, x))} tokens, loss {loss.item():.3f}")
