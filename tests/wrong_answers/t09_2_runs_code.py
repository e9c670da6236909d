"""A wrong answer to exercise 09.2: it lets the file run code."""

import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present


def answer(net, path):
    held = torch.load(path, map_location="cpu", weights_only=False)
    for name in ("model", "model_state", "state_dict"):
        held = held.get(name, held)
    if held.keys() != net.state_dict().keys():
        consume_prefix_in_state_dict_if_present(held, "module.")
    net.load_state_dict(held)
