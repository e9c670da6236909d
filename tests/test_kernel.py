"""Jobs launched from real Jupyter kernels: interrupts, a killed kernel, three kernels at once, memory, stored outputs."""

from __future__ import annotations

import os
import re
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

import ddpkit
from ddpkit.errors import LaunchError
from ddpkit.runfolder import wire

pytestmark = pytest.mark.job


class Kernel:
    """A real kernel, and what its cells print and show."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager, self.client = manager, client

    def run(self, code: str, timeout: float = 120) -> dict[str, Any]:
        """Run a cell to its end; its stdout, the bundles it displayed and its error."""
        shown: dict[str, Any] = {"stdout": "", "displayed": [], "error": None, "messages": 0}

        def keep(message: dict[str, Any]) -> None:
            kind, content = message["msg_type"], message["content"]
            shown["messages"] += 1
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
def kernel(cwd: Path, **env: str) -> Iterator[Kernel]:
    """A kernel of this environment in `cwd`."""
    # Sockets that are files: a TCP port may be taken by a job beside it before the kernel listens there.
    sockets = tempfile.TemporaryDirectory(prefix="kernel-")
    manager = KernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets.name}/socket")
    manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager.start_kernel(cwd=str(cwd), env={**os.environ, **env})
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


FLOOD = "import sys\nfor i in range(20_000): sys.stdout.write(f'{i:06d} '.ljust(79, 'x') + '\\n')\n"


def test_text_is_one_message_a_batch_and_says_how_much_of_a_flood_it_leaves_out(home: Path) -> None:
    (home / "flood.py").write_text(FLOOD)
    (home / "few.py").write_text("import sys\nfor i in range(300): print('line', i)\nprint('bad', file=sys.stderr)\n")
    with kernel(home, DDPKIT_SHOW="text") as k:
        k.run("import ddpkit; print('before', end=' ')\nddpkit.launch('few.py', timeout=60)")
        few = k.run("print('before'); run = ddpkit.launch('few.py', timeout=60); print('after', run.state)")
        flood = k.run(
            "run = ddpkit.launch('flood.py', timeout=120)\nprint([len(r.stdout.splitlines()) for r in run.ranks])"
        )
        live = k.run("ddpkit.launch('few.py', show=True, timeout=60)")
        kept = k.run("%%capture kept\nddpkit.launch('few.py', timeout=60)")["stdout"] + k.run("print(kept)")["stdout"]
        later = k.run("run = ddpkit.launch('few.py', wait=False, timeout=60)")["stdout"]
        other = k.run("print('mine', run.wait().state)")
    said = few["stdout"].splitlines()
    assert said[:2] == ["before", "few: 2 ranks · gloo on CPU"] and said[-2:] == [
        "few → passed · 2 ranks",
        "after passed",
    ]
    for rank in (0, 1):
        assert [s for s in said if s.startswith(f"rank {rank} │")] == [f"rank {rank} │ line {i}" for i in range(300)]
        assert said.count(f"rank {rank} ! bad") == 1
        lines = [s for s in flood["stdout"].splitlines() if s.startswith(f"rank {rank} ")]
        left_out = [int(n.replace(",", "")) for n in re.findall(rf"rank {rank} … ([\d,]+) lines? ", flood["stdout"])]
        assert left_out and len(lines) - len(left_out) + sum(left_out) == 20_000
        assert lines[-1].startswith(f"rank {rank} │ 019999 xx")
    assert flood["stdout"].endswith("flood → passed · 2 ranks\n[20000, 20000]\n")
    assert few["displayed"] == flood["displayed"] == [], "text came as displays"
    assert flood["messages"] < 150 and few["messages"] < 30
    assert live["displayed"][0]["text/plain"] == "live view of few: 2 ranks", "an explicit show= does not win"
    assert kept.count("rank 1 │ line 299") == 1
    assert other["stdout"] == "mine passed\n", f"the text of another cell's job, {later!r}"


def test_an_unknown_default_is_one_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wire.ENV_SHOW, "txt")
    with pytest.raises(
        LaunchError, match=r"^launch: DDPKIT_SHOW=txt is not known; use text, 1 \(the live view\) or 0 "
    ):
        ddpkit.launch(lambda: None)
    assert not list(home.glob(".ddpkit/runs/*"))


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
