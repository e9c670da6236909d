"""A training run with Accelerate; with `--wrong` rank 1's data has a label that the model does not have."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
x, labels = torch.randn(64, 4), torch.randint(3, (64,))
if "--wrong" in sys.argv and accelerator.process_index == 1:
    labels[:] = 7
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(x, labels), batch_size=8))
for inputs, targets in loader:
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
print("learned", accelerator.unwrap_model(model).weight.abs().sum().item(), flush=True)
accelerator.end_training()
