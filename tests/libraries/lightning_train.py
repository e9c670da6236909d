"""A training run with Lightning; with `--wrong` rank 1's data has a label that the model does not have."""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def training_step(self, batch, number):
        inputs, labels = batch
        if "--wrong" in sys.argv and self.global_rank == 1 and number == 2:
            labels = labels + 7
        return nn.functional.cross_entropy(self.layer(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


lightning.seed_everything(0)
data = TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False
)
model = Classifier()
trainer.fit(model, DataLoader(data, batch_size=8))
print("learned", model.layer.weight.abs().sum().item(), flush=True)
