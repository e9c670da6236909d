"""A wrong answer to exercise 09.2: it takes out every `module.`, also the model's own."""

import torch


def answer(net, path):
    held = torch.load(path, map_location="cpu")
    for name in ("model", "model_state", "state_dict"):
        held = held.get(name, held)
    net.load_state_dict({name.replace("module.", ""): value for name, value in held.items()})
