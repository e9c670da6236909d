"""Has the answer load files of several layouts into plain models, and files that do not fit or that run code."""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

LAYOUTS = "", "model", "model_state", "state_dict"


class Plain(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body, self.head = nn.Linear(4, width), nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.body(x).relu())


class Tower(nn.Module):
    """Its only layer is called `module`, so that its own names begin as those of a wrapper."""

    def __init__(self, width):
        super().__init__()
        self.module = nn.Linear(4, width)

    def forward(self, x):
        return self.module(x)


def call(answer, seed):
    with setup("gloo") as here:
        torch.manual_seed(seed)
        width, path = 6 + seed % 5, Path(os.environ["DDPKIT_RUN"], f"file_of_rank_{here.rank}.pt")
        told = {}
        for kind in (Plain, Tower):
            for layout in LAYOUTS:
                for saved in ("plain model", "wrapper"):
                    net = DDP(kind(width))
                    state = (net if saved == "wrapper" else net.module).state_dict()
                    torch.save({"epoch": seed, layout: state} if layout else state, path)
                    called = f"the state of a {saved}, {f'under {layout!r}' if layout else 'as the whole file'}"
                    told[f"{called}, for a {kind.__name__}"] = _off(answer, kind(width), net.module, path)
        bad = {}
        state = Plain(width).state_dict()
        for called, content in (
            ("a file that lacks a weight", {name: value for name, value in state.items() if name != "head.bias"}),
            ("a file of a wider model", Plain(width + 1).state_dict()),
            ("a file that holds an argparse.Namespace", {"model": state, "args": argparse.Namespace(lr=0.1)}),
        ):
            torch.save(content, path)
            bad[called] = _off(answer, Plain(width), Plain(width), path)
        return {"told": told, "bad": bad}


def _off(answer, net, wanted, path):
    """How far the weights of `net` are from those wanted after the answer has loaded them, or what it raised."""
    try:
        answer(net, str(path))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    pairs = zip(net.state_dict().values(), wanted.state_dict().values(), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


def judge(returned, seed):
    for rank in returned.values():
        for called, off in rank["told"].items():
            if isinstance(off, str):
                return (
                    f"{off} for {called}",
                    "its weights in the model",
                    "the names in that file, and those of the model",
                )
            if off:
                return (
                    f"weights {off:.2g} off for {called}",
                    "the weights of the file",
                    "what is loaded, and what is skipped",
                )
        for called, off in rank["bad"].items():
            if not isinstance(off, str):
                look = "what refuses a name, a shape or an object that does not fit, and what covers it up"
                return f"no exception for {called}", "an exception", look
    return None
