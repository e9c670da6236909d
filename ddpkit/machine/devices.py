"""The GPUs of this machine, asked of the driver without torch, and the memory of processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver numbers it; `uuid` is what CUDA_VISIBLE_DEVICES may name it by."""

    index: int
    uuid: str
    name: str


@cache
def _driver() -> Any:
    """NVIDIA's management library, or None where there is no driver."""
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        return pynvml
    return None


def driver_version() -> str:
    """`550.54, serves CUDA up to 12.4`; "" without a driver."""
    nvml = _driver()
    if nvml is None:
        return ""
    cuda = nvml.nvmlSystemGetCudaDriverVersion()
    return f"{nvml.nvmlSystemGetDriverVersion()}, serves CUDA up to {cuda // 1000}.{cuda % 1000 // 10}"


def driver_problem() -> str:
    """Why an installed driver does not answer; "" where it does, or where there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return "" if error.value in absent else str(error)
    return ""


def all_gpus() -> list[Gpu]:
    """Every GPU the driver knows, in its order; empty without a driver."""
    nvml = _driver()
    if nvml is None:
        return []
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        found.append(Gpu(index, nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)))
    return found


def visible_gpus(visible: str | None) -> list[Gpu]:
    """The GPUs that a process with CUDA_VISIBLE_DEVICES=`visible` (None: not set) sees, in that order.

    As in CUDA, the list ends at the first entry that names no GPU.
    """
    gpus = all_gpus()
    if visible is None:
        return gpus
    chosen: list[Gpu] = []
    for entry in (e.strip() for e in visible.split(",")):
        found = next((g for g in gpus if entry == str(g.index) or (entry and g.uuid.startswith(entry))), None)
        if found is None:
            break
        chosen.append(found)
    return chosen


def rss_mib(pids: Sequence[int | None]) -> list[float | None]:
    """Resident memory of each process in MiB; None where it is gone."""
    import psutil

    found: list[float | None] = []
    for pid in pids:
        try:
            found.append(psutil.Process(pid).memory_info().rss / 2**20 if pid else None)
        except psutil.Error:
            found.append(None)
    return found


def device_mib(pids: Sequence[int | None]) -> dict[int, tuple[Gpu, float]]:
    """For each process that uses a GPU: which, and how much of its memory in MiB."""
    nvml = _driver()
    used: dict[int, tuple[Gpu, float]] = {}
    if nvml is None:
        return used
    for gpu in all_gpus():
        with contextlib.suppress(Exception):
            handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid in pids:
                    used[process.pid] = (gpu, (process.usedGpuMemory or 0) / 2**20)
    return used


def device_busy(pids: Sequence[int]) -> dict[int, float]:
    """For each process that uses a GPU: the share of time in which that GPU computed lately, for any process. A wait in
    NCCL counts as computing."""
    nvml = _driver()
    busy = {}
    for pid, (gpu, _) in device_mib(pids).items():
        with contextlib.suppress(Exception):
            rates = nvml.nvmlDeviceGetUtilizationRates(nvml.nvmlDeviceGetHandleByIndex(gpu.index))
            busy[pid] = rates.gpu / 100
    return busy


def most_ranks() -> int:
    """The most ranks that make sense here: four a core, and at least 16."""
    return max(16, 4 * (os.cpu_count() or 1))
