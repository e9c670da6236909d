"""A real Jupyter kernel for a benchmark, and what its cells publish."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from typing import Any

from jupyter_client import BlockingKernelClient
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).parents[1]
PATIENCE_S = 240


@contextmanager
def kernel(
    cwd: Path, python: str = sys.executable, env: Mapping[str, str] | None = None
) -> Iterator[BlockingKernelClient]:
    """A fresh ipykernel of the environment of `python`, which imports ddpkit from this repository."""
    manager = KernelManager(kernel_name="python3")
    manager.kernel_spec.argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    around = os.environ | {"PYTHONPATH": str(ROOT), **(env or {})}
    manager.start_kernel(cwd=str(cwd), env=around, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=120)
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def messages(client: BlockingKernelClient, code: str) -> Iterator[dict[str, Any]]:
    """Run the cell and yield what the kernel publishes, as it comes; a cell that raises ends the benchmark."""
    request = client.execute(code)
    while True:
        try:
            message = client.get_iopub_msg(timeout=PATIENCE_S)
        except Empty:
            raise SystemExit(f"no message for {PATIENCE_S} s while running {code!r}") from None
        yield message
        kind, content = message["msg_type"], message["content"]
        if kind == "error":
            raise SystemExit(f"{code}\n{content['ename']}: {content['evalue']}")
        own = message["parent_header"].get("msg_id") == request
        if own and kind == "status" and content["execution_state"] == "idle":
            return


def printed(client: BlockingKernelClient, code: str) -> str:
    """Run the cell and return what it printed, which is shown where the cell raises."""
    text = ""
    for message in messages(client, code):
        if message["msg_type"] == "stream":
            text += message["content"]["text"]
        elif message["msg_type"] == "error":
            print(text, file=sys.stderr)
    return text
