"""A training run configured by hydra; `+wrong=7` puts a label that the model does not have into rank 1's data."""

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@hydra.main(version_base=None)
def main(config: DictConfig) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(config.get("seed", 0))
    model = DDP(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.1))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        labels = torch.randint(3, (8,), generator=generator)
        if dist.get_rank() == 1 and "wrong" in config:
            labels[0] = config.wrong
        loss = nn.functional.cross_entropy(model(torch.randn(8, 4, generator=generator)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("learned", model.module.weight.abs().sum().item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
