"""Prints what torch says of itself and of this machine, as JSON. `ddpkit doctor` runs it in a process of its own."""

from __future__ import annotations

import contextlib
import json
from typing import Any


def facts() -> dict[str, Any]:
    """Versions, backends and GPUs of this torch. `nccl` is None on a CPU build, where torch.cuda.nccl.version() raises."""
    import torch
    import torch.distributed as dist

    nccl = None
    with contextlib.suppress(Exception):
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    found = dist.is_available()
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if found and dist.is_backend_available(name)]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "backends": backends,
        "nccl": nccl,
        "gpus": _gpus(torch),
        "architectures": torch.cuda.get_arch_list() if torch.version.cuda else [],
    }


def _gpus(torch: Any) -> dict[str, Any]:
    try:
        count = torch.cuda.device_count()
        names = [torch.cuda.get_device_name(i) for i in range(count)]
        if count:
            torch.zeros(1, device="cuda")
        capabilities = [".".join(map(str, torch.cuda.get_device_capability(i))) for i in range(count)]
    except Exception as error:
        return {"names": [], "capabilities": [], "error": str(error).partition("\n")[0]}
    return {"names": names, "capabilities": capabilities, "error": ""}


if __name__ == "__main__":
    print(json.dumps(facts()))
