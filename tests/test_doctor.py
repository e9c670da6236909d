"""`ddpkit doctor` on this machine and on broken ones: each fault that is put in is told, and nothing else is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import ddpkit
from ddpkit.machine import checks, devices, topology, torch_checks
from ddpkit.machine.checks import Check
from ddpkit.machine.examination import Report

# Each of these imports torch: one after the other leaves the second core to the jobs that are tested beside it.
pytestmark = pytest.mark.xdist_group("doctor")

DDPKIT = str(Path(sys.executable).with_name("ddpkit"))
CLEAN = {
    k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "GLOO_", "OMP_", "CUDA_", "MASTER_", "PYTORCH_"))
}


def may(*words: str) -> bool:
    """Whether this machine lets the test do so: a container often forbids new namespaces and mounts."""
    try:
        return subprocess.run([*words, "true"], capture_output=True, timeout=20, check=False).returncode == 0
    except OSError:
        return False


def examined(*before: str, env: Mapping[str, str] | None = None) -> tuple[int, dict[str, Check]]:
    """The exit code and the lines, by name, of a doctor that is started by the words of `before`."""
    words = [*before, DDPKIT, "doctor", "--json"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=180, env={**CLEAN, **(env or {})}, check=False)
    assert ran.stdout, ran.stderr
    found = [Check(**each) for each in json.loads(ran.stdout)["checks"]]
    return ran.returncode, {each.name: each for each in found}


@pytest.fixture(scope="module")
def healthy() -> tuple[int, dict[str, Check]]:
    return examined()


def problems(lines: Mapping[str, Check]) -> set[str]:
    return {name for name, each in lines.items() if each.level == "problem"}


def test_this_machine(healthy: tuple[int, dict[str, Check]]) -> None:
    import torch

    code, lines = healthy
    assert torch.__version__ in lines["torch"].found and "gloo" in lines["backends"].found
    assert lines["python"].found.startswith(sys.version.split()[0])
    names = {"GPUs", "/dev/shm", "open files", "processes", "memory", "cores", "interfaces", "host name", "ports"}
    assert names <= set(lines) and {"kernel log", "variables"} <= set(lines)
    assert code == (1 if problems(lines) else 0)
    for each in lines.values():
        assert each.found and (each.advice or each.level == "ok"), each
        assert not each.advice or each.advice.endswith((".", "`")), each


@pytest.mark.skipif(not may("unshare", "-n"), reason="no network namespace may be made here")
def test_a_network_without_loopback(healthy: tuple[int, dict[str, Check]]) -> None:
    code, lines = examined("unshare", "-n")
    of_network = {"interfaces", "ports"}
    assert code == 1 and of_network <= problems(lines) <= of_network | {"host name"} | problems(healthy[1])
    assert lines["interfaces"].found.endswith("no loopback") and "ip link set lo up" in lines["interfaces"].advice


@pytest.mark.skipif(not may("unshare", "-m"), reason="no mount namespace may be made here")
def test_a_tiny_shared_memory(healthy: tuple[int, dict[str, Check]]) -> None:
    code, lines = examined("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh")
    assert code == 1 and problems(lines) == problems(healthy[1]) | {"/dev/shm"}
    assert lines["/dev/shm"].found == "64 MiB, 64 MiB free" and "--shm-size" in lines["/dev/shm"].advice


def test_few_open_files(healthy: tuple[int, dict[str, Check]]) -> None:
    code, lines = examined("sh", "-c", 'ulimit -n 256 && exec "$@"', "sh")
    assert code == 1 and problems(lines) == problems(healthy[1]) | {"open files"}
    assert lines["open files"].found.startswith("256 ") and "nofile" in lines["open files"].advice


def test_stale_variables(healthy: tuple[int, dict[str, Check]]) -> None:
    stale = {
        "NCCL_TREE_THRESHOLD": "0",
        "NCCL_ASYNC_ERROR_HANDLING": "1",
        "CUDA_LAUNCH_BLOCKING": "1",
        "NCCL_P2P_DISABLE": "0",
    }
    code, lines = examined(env=stale)
    assert code == healthy[0] and problems(lines) == problems(healthy[1])
    assert "reads it no more" in lines["NCCL_TREE_THRESHOLD"].found
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" in lines["NCCL_ASYNC_ERROR_HANDLING"].found
    assert lines["CUDA_LAUNCH_BLOCKING"].level == "note"
    assert "NCCL_P2P_DISABLE" not in lines and "variables" not in lines


@pytest.mark.job
def test_what_is_left_of_another_job_breaks_the_next(healthy: tuple[int, dict[str, Check]]) -> None:
    code, lines = examined(env={"RANK": "3", "WORLD_SIZE": "8", "GLOO_SOCKET_IFNAME": "eth77"})
    assert code == 1 and problems(lines) == problems(healthy[1]) | {"RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"}
    assert "no such interface" in lines["GLOO_SOCKET_IFNAME"].found
    assert "RANK" not in examined(env={"RANK": "3", "TORCHELASTIC_RUN_ID": "x"})[1]


def test_a_torch_that_cannot_be_imported_is_one_problem(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open shared object file')"
    )
    code, lines = examined(env={"PYTHONPATH": str(tmp_path)})
    assert code == 1 and lines["torch"].level == "problem" and "libcudart.so.12" in lines["torch"].found


def test_the_kernels_log_is_read_for_what_the_catalog_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for line, level, page in [
        (
            "[4.120001] NVRM: Xid (PCI:0000:41:00): 79, pid=41, GPU has fallen off the bus.",
            "problem",
            "gpu_off_the_bus",
        ),
        (
            "[4.120001] NVRM: Xid (PCI:0000:41:00): 48, pid=41, An uncorrectable double bit error",
            "problem",
            "gpu_memory_error",
        ),
        ("[4.120001] Out of memory: Killed process 41 (python) total-vm:1kB", "note", "oom_killer"),
        ("[4.120001] eth0: link up", "ok", ""),
    ]:
        program = tmp_path / "dmesg"
        program.write_text(f"#!/bin/sh\necho '{line}'\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        found = checks.kernel_log()
        assert found.level == level and page in found.advice, found


PAIRS = """\
\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tPIX\tNODE\tNODE\tSYS\t0-47,96-143\t0\t\tN/A
GPU1\tPIX\t X \tNODE\tNODE\tSYS\t0-47,96-143\t0\t\tN/A
GPU2\tNODE\tNODE\t X \tPIX\tSYS\t0-47,96-143\t0\t\tN/A
GPU3\tNODE\tNODE\tPIX\t X \tSYS\t0-47,96-143\t0\t\tN/A
NIC0\tSYS\tSYS\tSYS\tSYS\t X
"""


@pytest.mark.parametrize(
    ("table", "level", "found", "advice"),
    [
        # After a table in github.com/NVIDIA/nccl/issues/1817, and one kind of connection in place of another.
        (PAIRS, "note", "groups of close GPUs: 0 1; 2 3; NODE between them", "CUDA_VISIBLE_DEVICES=0,1"),
        (PAIRS.replace("NODE", "NV12").replace("PIX", "NV12"), "ok", "all 4 GPUs are close: NV12", ""),
        (
            PAIRS.replace("NODE", "SYS").replace("PIX", "PHB"),
            "note",
            "each pair of GPUs is connected through a CPU",
            "CommProf",
        ),
        (PAIRS.replace("NODE", "PXB"), "ok", "all 4 GPUs are close: PIX, PXB", ""),
    ],
)
def test_the_topology_says_which_gpus_are_close(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, table: str, level: str, found: str, advice: str
) -> None:
    (tmp_path / "table").write_text(table)
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat {tmp_path / 'table'}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (check,) = topology.topology()
    assert check.level == level and found in check.found and advice in check.advice, check


@pytest.mark.parametrize(
    "told", ["exit 9", "echo Failed to initialize NVML: Driver/library version mismatch", "echo '\tGPU0'"]
)
def test_no_topology_without_two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{told}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert not list(topology.topology())


GPU = devices.Gpu(0, "GPU-1", "NVIDIA H200")
TOLD: dict[str, Any] = {"torch": "2.13.0", "cuda": "12.6", "hip": None, "backends": ["gloo", "nccl"], "nccl": "2.27.3"}
SEEN = {"names": ["NVIDIA H200"], "capabilities": ["9.0"], "error": ""}


@pytest.mark.parametrize(
    ("known", "seen", "problem", "name", "words"),
    [
        ([GPU], SEEN, "", "GPUs", "1 known to the driver (NVIDIA H200), 1 usable by torch"),
        ([], {**SEEN, "names": []}, "", "GPUs", "none: jobs run with gloo"),
        ([GPU], {**SEEN, "names": []}, "", "GPUs", "0 usable by torch"),
        ([GPU], {**SEEN, "names": [], "error": "CUDA unknown error"}, "", "GPUs", "CUDA unknown error"),
        ([], {**SEEN, "names": []}, "Driver/library version mismatch", "driver", "Driver/library version mismatch"),
        ([GPU], {**SEEN, "capabilities": ["12.0"]}, "", "kernels", "none for sm_120"),
    ],
)
def test_a_gpu_machine_is_told_by_what_driver_and_torch_say(
    monkeypatch: pytest.MonkeyPatch, known: list[devices.Gpu], seen: dict[str, Any], problem: str, name: str, words: str
) -> None:
    """No GPU is here: the answers of the driver and of torch are given, and what is made of them is looked at."""
    monkeypatch.setattr(torch_checks, "all_gpus", lambda: known)
    monkeypatch.setattr(torch_checks, "driver_problem", lambda: problem)
    monkeypatch.setattr(torch_checks, "driver_version", lambda: "550.54, serves CUDA up to 12.4")
    told = {**TOLD, "gpus": seen, "architectures": ["sm_80", "sm_90"]}
    lines = {each.name: each for each in torch_checks.gpus(told, {})}
    assert words in lines[name].found, lines
    assert (lines[name].level == "problem") == (words != "1 known to the driver (NVIDIA H200), 1 usable by torch")


def test_the_report_is_text_and_json() -> None:
    lines = (Check("torch", "2.13.0"), Check("/dev/shm", "64 MiB", "problem", "Give it more."))
    report = Report(lines)
    assert str(report).splitlines()[-1] == "1 would break a job: /dev/shm." and "-> Give it more." in str(report)
    assert json.loads(report.json())["problems"] == 1
    assert str(Report(lines[:1])).endswith("Nothing here would break a job.")


def test_the_doctor_is_a_function_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_checks, "probe", lambda: {"error": "no torch"})
    report = ddpkit.doctor({})
    assert isinstance(report, Report) and report.problems[0].name == "torch"
