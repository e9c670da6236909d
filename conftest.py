"""For pytest: answers to the lessons' questions, kernels that talk over files, a skip where no network may be made."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import nbval.kernel
import pytest
from jupyter_client.manager import KernelManager

ANSWERS = Path(__file__).with_name("tests") / "answers.toml"
NEED_NETWORKS = ("08_backends_and_network.ipynb", "test_network.py")
NETWORK = "ip link add eth0 type veth peer name eth1 && ip rule add ipproto tcp blackhole && test -w /dev/net/tun"


class FileSocketKernelManager(KernelManager):
    """A kernel manager whose five sockets are files in a temporary folder: a job beside it may take a port before it listens."""

    def __init__(self, **options: Any) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kernel-")
        super().__init__(transport="ipc", ip=str(Path(self.folder.name) / "socket"), **options)


nbval.kernel.KernelManager = FileSocketKernelManager


def pytest_configure(config: pytest.Config) -> None:
    """Only the notebooks' kernels answer by themselves."""
    if config.getoption("nbval", False):
        os.environ["DDPKIT_ANSWERS"] = str(ANSWERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip aloud what gives each rank a network of its own, where that is not permitted."""
    for item in items:
        if item.path.name in NEED_NETWORKS and not may_make_networks():
            item.add_marker(pytest.mark.skip(reason="no network namespace, veth or TUN device may be made here"))


@functools.cache
def may_make_networks() -> bool:
    """Whether this process may make a network namespace with interfaces, rules and a TUN device."""
    try:
        return subprocess.run(["unshare", "-n", "sh", "-c", NETWORK], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
