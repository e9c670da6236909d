"""Network namespaces of the labs: they, and what is in them, end with their processes, also when the kernel is killed."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import nbformat
import pytest
from conftest import left_after
from test_kernel import kernel

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "08_backends_and_network.ipynb"
pytestmark = pytest.mark.job


def namespaces() -> set[str]:
    """The network namespaces that some process is in."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(link))
        except OSError:
            continue
    return found


def interfaces() -> list[str]:
    """The interfaces of this host, by name, and its routing rules."""
    told = [subprocess.run(["ip", "-json", what], capture_output=True, text=True).stdout for what in ("link", "rule")]
    return [*sorted(link["ifname"] for link in json.loads(told[0])), told[1]]


def cell(name: str) -> str:
    return str(next(c.source for c in nbformat.read(NOTEBOOK, as_version=4).cells if c.id == name))


@pytest.mark.parametrize(
    "code",
    [cell("broken"), f"{cell('link')}\nddpkit.launch(steps_over, args=(LINKS, 100_000), show=False)"],
    ids=["a firewall", "a slow link"],
)
def test_a_killed_kernel_leaves_no_network_behind(home: Path, code: str) -> None:
    before, here = namespaces(), interfaces()
    with kernel(home) as k:
        k.run("import ddpkit\n%load_ext ddpkit")
        k.client.execute(code)
        until = time.monotonic() + 60
        while len(namespaces() - before) < 2:
            assert time.monotonic() < until, "the job made no network of its own"
            time.sleep(0.1)
        made = namespaces() - before
        k.kill()
        killed = time.monotonic()
        while made & namespaces():
            assert time.monotonic() < killed + 10, "a network namespace is left"
            time.sleep(0.1)
    assert not left_after(home, 10)
    assert interfaces() == here
