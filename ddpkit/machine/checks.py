"""What `ddpkit doctor` checks on the machine itself: limits, memory, network, the kernel log, variables."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import psutil

from ddpkit.diagnosis.log.lines import Source
from ddpkit.diagnosis.log.scan import scan

Level = Literal["ok", "note", "problem"]

GIB = 2**30
TORCHRUN_PORT = 29500
# Below these a job gets into trouble.
SMALL_SHM = 1 * GIB
FEW_FILES = 4096
FEW_PROCESSES = 1024
LITTLE_MEMORY = 2 * GIB
KERNEL_PAGES = ("oom_killer", "gpu_off_the_bus", "gpu_memory_error", "nvlink_error", "gpu_xid")


@dataclass(frozen=True)
class Check:
    """One line of the doctor: `name` is what was checked, `found` what is there, `advice` what to do ("" for nothing)."""

    name: str
    found: str
    level: Level = "ok"
    advice: str = ""


def python() -> Check:
    """Which Python runs this, and where."""
    return Check("python", f"{platform.python_version()}, {sys.executable}, {platform.system()} {platform.release()}")


def shared_memory(folder: str = "/dev/shm") -> Check:
    """The size of /dev/shm, through which loader workers pass batches and NCCL talks within a machine."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return Check(folder, "not there", "problem", "Mount it: loader workers and NCCL pass their data through it.")
    found = f"{_size(usage.total)}, {_size(usage.free)} free"
    if usage.free < SMALL_SHM:
        advice = (
            "Give it more: `docker run --shm-size=8g` or `--ipc=host`, in Kubernetes an emptyDir with medium: Memory, else "
            f"`mount -o remount,size=8g {folder}`. See `ddpkit explain loader_shared_memory`."
        )
        if usage.total >= SMALL_SHM:
            advice = f"Look for what fills it: `ls -la {folder}`. A killed job leaves torch_* and nccl-* there."
        return Check(folder, found, "problem", advice)
    return Check(folder, found)


def open_files() -> Check:
    """The limit on open files: every tensor that a loader worker hands over keeps one open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)} for this shell, at most {_limit(hard)}"
    if soft == resource.RLIM_INFINITY or soft >= FEW_FILES:
        return Check("open files", found)
    advice = f"`ulimit -n {hard if 0 < hard < 65536 else 65536}` before the job."
    if FEW_FILES > hard > 0:
        advice = "Raise the limit itself: `docker run --ulimit nofile=65536`, or LimitNOFILE= of the service."
    advice += " See `ddpkit explain too_many_open_files`."
    return Check("open files", found, "problem" if soft < 1024 else "note", advice)


def processes() -> Check:
    """The limit on processes and threads, here and in the container."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = {
        "ulimit -u": None if soft == resource.RLIM_INFINITY else soft,
        "pids.max of the cgroup": _cgroup("pids.max"),
    }
    told = {name: value for name, value in limits.items() if value is not None}
    if not told:
        return Check("processes", "no limit")
    name, least = min(told.items(), key=lambda item: item[1])
    if least < FEW_PROCESSES:
        advice = f"Raise {name}: each rank has its loader's workers, and each of them threads."
        return Check("processes", f"{least} ({name})", "problem", advice)
    return Check("processes", f"{least} ({name})")


def memory() -> Check:
    """How much memory there is, and how much of it this container may use."""
    machine = psutil.virtual_memory()
    limit, used = _cgroup("memory.max", "memory.limit_in_bytes"), _cgroup("memory.current", "memory.usage_in_bytes")
    found, free = f"{_size(machine.total)}, {_size(machine.available)} available", machine.available
    if limit is not None and limit < machine.total:
        free = min(free, limit - (used or 0))
        found += f"; this container may use {_size(limit)}, {_size(max(0, limit - (used or 0)))} is left"
    if free < LITTLE_MEMORY:
        advice = "End what else runs here, or raise the limit: above it the kernel kills a rank without a word."
        return Check("memory", found, "problem", advice)
    return Check("memory", found)


def cores(gpu_count: int, environment: Mapping[str, str]) -> Check:
    """How many cores each rank gets, by affinity and by the container's CPU quota."""
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota = _cpu_quota()
    count = min(count, quota) if quota else count
    ranks = gpu_count or 2
    each = count / ranks
    found = f"{count:g} for {ranks} ranks{'' if gpu_count else ' (gloo)'}: {each:g} each"
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > each:
        advice = f"`export OMP_NUM_THREADS={max(1, int(each))}`: more threads than cores make every rank slower."
        return Check("cores", f"{found}; OMP_NUM_THREADS={threads}", "note", advice)
    if each < 1:
        return Check("cores", found, "problem", "Start fewer ranks, or ask the scheduler for more cores.")
    return Check("cores", found)


def network(environment: Mapping[str, str]) -> Iterator[Check]:
    """Which interfaces are up, which one gloo would use, and whether the host name is this machine's."""
    addresses = psutil.net_if_addrs()
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    of = {a.address.partition("%")[0]: name for name in addresses for a in addresses[name]}
    loopback = next((of[a] for a in ("127.0.0.1", "::1") if of.get(a) in up), None)
    shown = ", ".join(f"{n} {_first_address(addresses[n])}" for n in sorted(up)) or "none is up"
    if loopback is None:
        advice = "Bring it up: `ip link set lo up`. Ranks of one machine meet there."
        yield Check("interfaces", f"{shown}; no loopback", "problem", advice)
    else:
        yield Check("interfaces", shown)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = environment.get(name)
        if wanted and not _interface_there(wanted, addresses):
            advice = f"Unset it, or name one of {', '.join(sorted(addresses))}."
            yield Check(name, f"{wanted}: no such interface here", "problem", advice)
    yield _host_name(of, up, environment)


def _interface_there(wanted: str, addresses: Mapping[str, Any]) -> bool:
    """NCCL takes prefixes, `=` for exact names and `^` for all but these; gloo takes exact names."""
    if wanted.startswith("^"):
        return True
    exact = wanted.startswith("=")
    names = wanted.removeprefix("=").split(",")
    return any(each == name or (not exact and each.startswith(name)) for each in addresses for name in names)


def _host_name(of: Mapping[str, str], up: set[str], environment: Mapping[str, str]) -> Check:
    name = socket.gethostname()
    advice = f"Add it to /etc/hosts (`127.0.1.1 {name}`), or set GLOO_SOCKET_IFNAME to one of {', '.join(sorted(up)) or 'lo'}."
    try:
        found = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError as error:
        return Check("host name", f"{name} does not resolve: {error.strerror or error}", "problem", advice)
    own = next((of[a] for a in found if a in of), None)
    if own is None and not any(a.startswith("127.") for a in found):
        return Check(
            "host name", f"{name} is {', '.join(found)}, which is no address of this machine", "problem", advice
        )
    used = environment.get("GLOO_SOCKET_IFNAME") or own or "lo"
    return Check("host name", f"{name} is {', '.join(found)}: gloo would use {used}")


def port() -> Check:
    """Whether torchrun's usual port is free, and whether any port can be opened and reached."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            pass
    except OSError as error:
        advice = "Loopback is missing or a filter is in the way: ranks cannot reach their store."
        return Check(
            "ports", f"a port of 127.0.0.1 cannot be opened and reached: {error.strerror or error}", "problem", advice
        )
    with socket.socket() as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind(("", TORCHRUN_PORT))
        except OSError:
            advice = "Another job runs, or one was left: `torchrun --standalone` takes a free port."
            return Check("ports", f"{TORCHRUN_PORT}, torchrun's usual one, is taken", "note", advice)
    return Check("ports", f"can be opened and reached; {TORCHRUN_PORT}, torchrun's usual one, is free")


def kernel_log() -> Check:
    """What the kernel wrote about killed processes and broken GPUs since boot."""
    try:
        ran = subprocess.run(["dmesg"], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return Check("kernel log", "cannot be read: there is no dmesg", "note", "Ask whoever runs this machine.")
    if ran.returncode:
        return Check("kernel log", "may not be read by this user", "note", "`sudo dmesg -T | grep -iE 'xid|oom-kill'`")
    hits = [h for h in scan([Source("dmesg", data=ran.stdout)]).hits if h.page.name in KERNEL_PAGES]
    if not hits:
        return Check("kernel log", "tells of no killed process and no broken GPU")
    last = hits[-1]
    level: Level = "note" if last.page.name == "oom_killer" else "problem"
    return Check(
        "kernel log",
        f"{len({hit.line.number for hit in hits})} lines, the last: {last.line.text[:140]}",
        level,
        f"`ddpkit explain {last.page.name}`",
    )


def variables(environment: Mapping[str, str]) -> Iterator[Check]:
    """Variables of this shell that nothing reads any more, that cost speed, or that belong to another job."""
    known = tomllib.loads(files("ddpkit.machine").joinpath("environment.toml").read_text(encoding="utf-8"))
    in_job = "TORCHELASTIC_RUN_ID" in environment
    found = False
    for name, about in known.items():
        value = environment.get(name)
        if value is None or value == about.get("unless") or (about["kind"] == "job" and in_job):
            continue
        found = True
        level: Level = "problem" if about["kind"] == "job" else "note"
        yield Check(
            name, f"is set to {value!r}: {about['why']}", level, f"{about['do'].capitalize()[:1]}{about['do'][1:]}."
        )
    if not found:
        yield Check("variables", f"none of {len(known)} that mislead is set")


def _cgroup(*names: str) -> int | None:
    """The smallest limit of this process's cgroup and those above it; None without a limit."""
    found = []
    for folder in _cgroup_folders():
        for name in names:
            with contextlib.suppress(OSError, ValueError):
                value = int((folder / name).read_text())
                # Version 1 writes a number near 2**63 for "no limit".
                found.append(value if value < 2**60 else sys.maxsize)
    least = min(found, default=sys.maxsize)
    return None if least == sys.maxsize else least


def _cgroup_folders() -> Iterator[Path]:
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for row in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = row.split(":", 2)
            base = root if not controllers else root / controllers.split(",")[0]
            own = base / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(base))


def _cpu_quota() -> float | None:
    """The cores that the cgroup grants; None without a limit."""
    for folder in _cgroup_folders():
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            return int(quota) / int(period)
        with contextlib.suppress(OSError, ValueError):
            quota_us = int((folder / "cpu.cfs_quota_us").read_text())
            if quota_us > 0:
                return quota_us / int((folder / "cpu.cfs_period_us").read_text())
    return None


def _first_address(addresses: Any) -> str:
    return next(
        (str(a.address) for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)), "without an address"
    )


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else str(value)


def _size(value: float) -> str:
    return f"{value / GIB:.1f} GiB" if value >= GIB else f"{value / 2**20:.0f} MiB"
