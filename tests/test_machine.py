"""What the driver says of GPUs, through a stand-in for NVIDIA's library: which GPU a rank uses, and how much of it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from ddpkit.machine import devices


class Driver:
    """Two GPUs; process 11 uses 512 MiB of the second."""

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{'ab'[handle]}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "H200"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=11, usedGpuMemory=512 * 2**20)] if handle == 1 else []

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=[0, 97][handle])


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_driver", Driver)


def test_gpus_and_their_order(driver: None) -> None:
    assert [g.uuid for g in devices.visible_gpus(None)] == ["GPU-a", "GPU-b"]
    assert [g.index for g in devices.visible_gpus("GPU-b,0")] == [1, 0]


def test_a_ranks_device_and_its_memory(driver: None) -> None:
    used = devices.device_mib([10, 11])
    assert list(used) == [11]
    gpu, mib = used[11]
    assert (gpu.index, mib) == (1, 512.0)


def test_how_busy_a_ranks_device_is(driver: None) -> None:
    assert devices.device_busy([10, 11]) == {11: 0.97}


def test_memory_of_a_process_that_is_gone() -> None:
    here, gone, never = devices.rss_mib([os.getpid(), 2**22 + 1, None])
    assert here and here > 1
    assert gone is None and never is None
