"""What torch says of itself and of this machine, as JSON on stdout: run by `ddpkit doctor` in a process of its own.

`python -m ddpkit.machine.probe` tells versions, backends and GPUs; `... probe detail` builds a DDP model over gloo, which dies
where this build does not survive TORCH_DISTRIBUTED_DEBUG=DETAIL.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from typing import Any


def facts() -> dict[str, Any]:
    """Versions, backends and GPUs of this torch; what cannot be asked of it is None."""
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
        peers = [[i, j] for i in range(count) for j in range(i) if not torch.cuda.can_device_access_peer(i, j)]
    except Exception as error:
        return {"names": [], "capabilities": [], "without_peer_access": [], "error": str(error).partition("\n")[0]}
    return {"names": names, "capabilities": capabilities, "without_peer_access": peers, "error": ""}


def detail() -> None:
    """Construct DDP over gloo in this one process and take a step; a crash leaves no core file."""
    import resource

    import torch
    import torch.distributed as dist

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        net(torch.ones(1, 2)).sum().backward()
        dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:] == ["detail"]:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        detail()
    else:
        print(json.dumps(facts()))
