"""Jobs launched from real Jupyter kernels: interrupts, a killed kernel, three kernels at once, memory, stored outputs."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import BLOCKED, left_after, living, wait_until_blocked
from jupyter_client import BlockingKernelClient
from jupyter_client.manager import KernelManager

pytestmark = pytest.mark.job


class Kernel:
    """A real kernel, and what its cells print and show."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager, self.client = manager, client

    def run(self, code: str, timeout: float = 120) -> dict[str, Any]:
        """Run a cell to its end; its stdout, the bundles it displayed and its error."""
        shown: dict[str, Any] = {"stdout": "", "displayed": [], "error": None}

        def keep(message: dict[str, Any]) -> None:
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and content["name"] == "stdout":
                shown["stdout"] += content["text"]
            elif kind in ("display_data", "execute_result"):
                shown["displayed"].append(content["data"])
            elif kind == "error":
                shown["error"] = f"{content['ename']}: {content['evalue']}"

        self.client.execute_interactive(code, output_hook=keep, timeout=timeout, allow_stdin=False)
        return shown

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.process.pid)  # type: ignore[union-attr]

    def kill(self) -> None:
        """SIGKILL, as the kernel's out-of-memory killer would."""
        os.kill(self.pid, signal.SIGKILL)


@contextmanager
def kernel(cwd: Path) -> Iterator[Kernel]:
    """A kernel of this environment in `cwd`."""
    # Sockets that are files: a TCP port may be taken by a job beside it before the kernel listens there.
    sockets = tempfile.TemporaryDirectory(prefix="kernel-")
    manager = KernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets.name}/socket")
    manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager.start_kernel(cwd=str(cwd))
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=120)
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        sockets.cleanup()


def test_a_cell_shows_the_view_and_then_the_runs_text_once(home: Path) -> None:
    with kernel(home) as k:
        first = k.run("%load_ext ddpkit\nimport ddpkit\ndef f(): print('hello')\nddpkit.launch(f, timeout=60)")
        again = k.run("%%torchrun --nproc-per-node 2 --as r\nprint('hello')")
        alone = k.run("r")
    assert first["error"] is None
    live, ended = first["displayed"]
    assert live["text/plain"] == "live view of f: 2 ranks"
    assert "application/vnd.jupyter.widget-view+json" in live
    assert ended["text/plain"] == "f → passed · 2 ranks"
    assert [d["text/plain"] for d in again["displayed"]] == ["live view of r: 2 ranks", "r → passed · 2 ranks"]
    assert [d["text/plain"] for d in alone["displayed"]] == ["r → passed · 2 ranks"]


def test_a_launch_error_is_one_sentence_in_the_notebook(home: Path) -> None:
    with kernel(home) as k:
        shown = k.run("import ddpkit\nddpkit.launch('no.py')")
    assert shown["error"].startswith("LaunchError: launch: there is no script no.py in ")


def test_the_stop_square_gives_control_back(home: Path) -> None:
    (home / "blocked.py").write_text(BLOCKED)
    with kernel(home) as k:
        k.run("import ddpkit")
        k.client.execute("run = ddpkit.launch('blocked.py')")
        wait_until_blocked(home)
        before = time.monotonic()
        k.manager.interrupt_kernel()
        shown = k.run("print(run.state, run.ranks[0].stdout)")
        assert time.monotonic() - before < 5
    assert shown["stdout"] == "stopped ready\n\n"


def test_a_killed_kernel_leaves_no_process_of_its_job(home: Path) -> None:
    (home / "blocked.py").write_text(BLOCKED)
    with kernel(home) as k:
        k.client.execute("import ddpkit; run = ddpkit.launch('blocked.py')")
        wait_until_blocked(home)
        assert len(living(home)) >= 5
        k.kill()
        assert not left_after(home, 10)


def test_three_kernels_launch_at_once(home: Path) -> None:
    (home / "meet.py").write_text(
        "import time, torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "t = torch.ones(1); dist.all_reduce(t); print('sum', t.item())\n"
        "dist.destroy_process_group()\n"
    )
    with kernel(home) as a, kernel(home) as b, kernel(home) as c:
        for k in (a, b, c):
            k.client.execute("import ddpkit; runs = [ddpkit.launch('meet.py', show=False) for _ in range(2)]")
        for k in (a, b, c):
            shown = k.run("print([r.state for r in runs], runs[1].ranks[0].stdout)", timeout=240)
            assert shown["stdout"] == "['passed', 'passed'] sum 2.0\n\n"


def test_a_flood_leaves_the_kernel_small(home: Path) -> None:
    (home / "flood.py").write_text(
        "import sys\nfor i in range(100_000): sys.stdout.write(f'{i:06d} '.ljust(79, 'x') + '\\n')\n"
    )
    with kernel(home) as k:
        k.run("import ddpkit\nddpkit.launch('flood.py', nproc=1, timeout=200); import gc; gc.collect()")
        before = psutil.Process(k.pid).memory_info().rss
        peak = before
        done = k.client.execute("run = ddpkit.launch('flood.py', timeout=200)")
        while True:
            peak = max(peak, psutil.Process(k.pid).memory_info().rss)
            try:
                if k.client.get_shell_msg(timeout=0.05)["parent_header"].get("msg_id") == done:
                    break
            except Exception:
                continue
        shown = k.run("print(run.state, [len(r.stdout.splitlines()) for r in run.ranks])")
    assert shown["stdout"] == "passed [100000, 100000]\n"
    assert (peak - before) / 2**20 < 60


def test_the_kernel_is_free_while_a_job_runs_in_the_background(home: Path) -> None:
    (home / "blocked.py").write_text(BLOCKED)
    with kernel(home) as k:
        shown = k.run("import ddpkit; run = ddpkit.launch('blocked.py', wait=False)\nprint(run.state)")
        assert shown["stdout"] == "running\n"
        wait_until_blocked(home)
        assert k.run("print(run.stop().state)")["stdout"] == "stopped\n"
