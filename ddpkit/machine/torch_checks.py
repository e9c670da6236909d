"""What `ddpkit doctor` asks of torch and of the driver: build, backends, GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from .checks import Check
from .devices import all_gpus, driver_problem, driver_version

PROBE_S = 120


def probe() -> dict[str, Any]:
    """What `ddpkit.machine.probe` prints; only "error", the reason, where torch cannot be imported."""
    command = [sys.executable, "-m", "ddpkit.machine.probe"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {PROBE_S} s"}
    if ran.returncode:
        return {"error": "".join(ran.stderr.strip().splitlines()[-1:])}
    return dict(json.loads(ran.stdout.strip().splitlines()[-1]))


def torch_build(told: Mapping[str, Any]) -> Iterator[Check]:
    """torch, what it was built for, its backends and NCCL."""
    if "torch" not in told:
        advice = "Install torch in this environment: `pip install torch`."
        yield Check("torch", f"cannot be imported: {told.get('error')}", "problem", advice)
        return
    built = f"CUDA {told['cuda']}" if told["cuda"] else f"ROCm {told['hip']}" if told["hip"] else "the CPU alone"
    yield Check("torch", f"{told['torch']}, built for {built}")
    backends = told["backends"]
    if "gloo" in backends or "nccl" in backends:
        yield Check("backends", ", ".join(backends))
    else:
        yield Check("backends", "neither gloo nor nccl", "problem", "Install a torch that has torch.distributed.")
    if told["cuda"] or told["hip"]:
        there = told["nccl"] or "none"
        advice = "" if told["nccl"] else "This build has no NCCL: use gloo, or a build that has it."
        yield Check("NCCL", there, "ok" if told["nccl"] else "problem", advice)


def gpus(told: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[Check]:
    """The GPUs that the driver knows, and the GPUs that torch can use."""
    known = all_gpus()
    seen = told.get("gpus", {"names": [], "error": "", "capabilities": []})
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    limit = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
    if problem := driver_problem():
        advice = "Reboot, or reload the driver's modules: kernel and library must be of one version."
        yield Check("driver", problem, "problem", advice)
    elif known:
        yield Check("driver", driver_version())
    if not known and not seen["names"]:
        advice = (
            "This torch is built for CUDA: install the driver, or the CPU build of torch." if told.get("cuda") else ""
        )
        yield Check("GPUs", f"none{limit}: jobs run with gloo on the CPU", "problem" if advice else "ok", advice)
        return
    names = ", ".join(dict.fromkeys([g.name for g in known] or seen["names"]))
    found = f"{len(known)} known to the driver ({names}), {len(seen['names'])} usable by torch{limit}"
    if seen["error"]:
        advice = "See `ddpkit explain driver_mismatch` and `ddpkit explain invalid_device`."
        yield Check("GPUs", f"{found}: {seen['error']}", "problem", advice)
    elif not seen["names"] and told.get("torch"):
        yield Check("GPUs", found, "problem", "Install the CUDA build of torch, or unset CUDA_VISIBLE_DEVICES.")
    else:
        yield Check("GPUs", found)
    yield from _architectures(told, seen)


def _architectures(told: Mapping[str, Any], seen: Mapping[str, Any]) -> Iterator[Check]:
    """Whether this build has kernels for each GPU: for its architecture, or for an older one of the same generation."""
    built = [a.removeprefix("sm_") for a in told.get("architectures", ()) if a.startswith("sm_")]
    for capability in dict.fromkeys(seen["capabilities"]):
        major, minor = capability.split(".")
        fitting = [a for a in built if a[:-1] == major and a[-1].isdigit() and a[-1] <= minor]
        if built and not fitting and f"compute_{major}{minor}" not in told.get("architectures", ()):
            found = f"none for sm_{major}{minor}; this torch has sm_{', sm_'.join(built)}"
            advice = "Install a build of torch for this GPU: `ddpkit explain no_kernel_image`."
            yield Check("kernels", found, "problem", advice)
