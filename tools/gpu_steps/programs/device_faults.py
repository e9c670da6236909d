"""What one process meets on a GPU; the first argument names the case. Each ends the process with CUDA's own words."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

GIB = 1 << 30


def fill() -> None:
    """Take memory until there is no more."""
    kept = []
    while True:
        kept.append(torch.empty(2 * GIB, dtype=torch.uint8, device="cuda"))


def snapshot() -> None:
    """Run out of a small share of the GPU, with who allocated what written down, and the same in segments that grow."""
    torch.cuda.set_per_process_memory_fraction(0.01)
    torch.cuda.memory._record_memory_history(max_entries=10_000)
    torch._C._cuda_attach_out_of_memory_observer(observed)
    model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096)).cuda()
    kept = []
    while True:
        kept.append(model(torch.randn(4096, 4096, device="cuda")))


def observed(device: int, wanted: int, total: int, free: int) -> None:
    """What torch tells whoever asks to be told, before it raises; then the largest that was allocated, and where."""
    print(f"observer: GPU {device}, wanted {wanted}, total or allowed {total}, free {free}", flush=True)
    largest = []
    for segment in torch.cuda.memory._snapshot()["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                lines = [frame for frame in block["frames"] if frame["filename"] == __file__]
                where = f"line {lines[0]['line']} of {lines[0]['name']}" if lines else "elsewhere"
                largest.append((block["size"], where))
    for size, where in sorted(largest, reverse=True)[:5]:
        print(f"snapshot: {size / 2**20:.1f} MiB allocated at {where}", flush=True)
    torch.cuda.memory._dump_snapshot("snapshot.pickle")
    print(f"snapshot.pickle: {os.path.getsize('snapshot.pickle')} bytes", flush=True)


def device_assert() -> None:
    """A token that the model's table does not have."""
    table = nn.Embedding(100, 8).cuda()
    tokens = torch.tensor([3, 41, 100], device="cuda")
    vectors = table(tokens)
    print(f"mean {vectors.mean().item():.2f}")


def illegal_access() -> None:
    """A kernel of one's own writes where nothing is."""
    source = 'extern "C" __global__ void spread(float* to, int step) { to[(long long)threadIdx.x * step] = 1.0f; }'
    spread = torch.cuda._compile_kernel(source, "spread")
    to = torch.zeros(64, device="cuda")
    spread(grid=(1, 1, 1), block=(64, 1, 1), args=[to, 1 << 30])
    print(f"sum {to.sum().item():.2f}")


if __name__ == "__main__":
    {"fill": fill, "snapshot": snapshot, "device_assert": device_assert, "illegal_access": illegal_access}[
        sys.argv[1]
    ]()
