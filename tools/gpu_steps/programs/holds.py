"""Holds 1 GiB of the GPU, on the CPU 1 MiB, for as many seconds as the first argument says."""

import sys
import time

import torch

from ddpkit.rank import setup

with setup() as here:
    held = torch.ones(1 << (28 if here.device.type == "cuda" else 18), device=here.device)
    print("holds", flush=True)
    time.sleep(float(sys.argv[1]))
