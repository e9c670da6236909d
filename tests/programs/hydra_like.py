"""Written as under hydra: overrides on the command line, a config, and a trainer class. `model.spare=true` breaks it."""

import functools
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CONFIG = {"model.width": "16", "model.spare": "false", "trainer.steps": "4", "optimizer.lr": "0.05"}


def configured(function):
    @functools.wraps(function)
    def main():
        return function(CONFIG | dict(word.split("=") for word in sys.argv[1:]))

    return main


class Net(nn.Module):
    def __init__(self, width, spare):
        super().__init__()
        self.body, self.head = nn.Linear(8, width), nn.Linear(width, 1)
        self.spare = nn.Linear(width, width) if spare else None

    def forward(self, x):
        return self.head(self.body(x).relu())


class Trainer:
    def __init__(self, config):
        self.config = config
        net = Net(int(config["model.width"]), config["model.spare"] == "true")
        self.model = DDP(
            net,
            gradient_as_bucket_view=True,  # saves memory
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=float(config["optimizer.lr"]))

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self):
        for step in range(int(self.config["trainer.steps"])):
            x = torch.randn(8, 8)
            print(f"step {step}: loss {self.step(x, x.sum(1, keepdim=True)):.3f}")


@configured
def main(config):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    Trainer(config).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
