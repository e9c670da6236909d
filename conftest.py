"""The notebooks' kernels in `pytest --nbval` talk over files: a job beside them may take a port before they listen."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import nbval.kernel
from jupyter_client.manager import KernelManager


class FileSocketKernelManager(KernelManager):
    """A kernel manager whose five sockets are files in a temporary folder."""

    def __init__(self, **options: Any) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kernel-")
        super().__init__(transport="ipc", ip=str(Path(self.folder.name) / "socket"), **options)


nbval.kernel.KernelManager = FileSocketKernelManager
