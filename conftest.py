"""For `pytest --nbval`: the answers to the lessons' questions, and kernels that talk over files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import nbval.kernel
import pytest
from jupyter_client.manager import KernelManager

ANSWERS = Path(__file__).with_name("tests") / "answers.toml"


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
