"""How the GPUs of this machine are connected, as `nvidia-smi topo -m` tells."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping

from .checks import Check

# By NVIDIA's legend these are NVLink, or PCIe bridges alone; all others go through a CPU.
_CLOSE = re.compile(r"NV\d+|PIX|PXB")
_GPU = re.compile(r"GPU\d+")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")

# The kind of connection by pair of GPUs, the lower number first.
Links = Mapping[tuple[int, int], str]


def topology() -> Iterator[Check]:
    """Which GPUs are close to each other; nothing where there are fewer than two, or no `nvidia-smi`."""
    try:
        ran = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return
    links = read_links(ran.stdout)
    groups = close_groups(links)
    if len(groups) == 1:
        yield Check("topology", f"all {len(groups[0])} GPUs are close: {', '.join(sorted(set(links.values())))}")
    if len(groups) < 2:
        return
    apart = ", ".join(sorted({kind for kind in links.values() if not _CLOSE.fullmatch(kind)}))
    largest = max(groups, key=len)
    if len(largest) == 1:
        advice = (
            "An all-reduce takes longer here: measure a step with `CommProfiler` of ddpkit.rank before you add GPUs."
        )
        yield Check("topology", f"each pair of GPUs is connected through a CPU: {apart}", "note", advice)
        return
    said = "; ".join(" ".join(map(str, group)) for group in groups)
    chosen = ",".join(map(str, largest))
    advice = f"Keep a job of up to {len(largest)} ranks within one group: CUDA_VISIBLE_DEVICES={chosen}"
    yield Check("topology", f"groups of close GPUs: {said}; {apart} between them", "note", advice)


def read_links(table: str) -> dict[tuple[int, int], str]:
    """The connections in a table of `nvidia-smi topo -m`; network cards and affinities are left out."""
    columns: list[int] = []
    links = {}
    for line in _COLOUR.sub("", table).splitlines():
        name, *kinds = line.split() or [""]
        if not columns:
            columns = [int(word[3:]) for word in (name, *kinds) if _GPU.fullmatch(word)]
        elif _GPU.fullmatch(name):
            for other, kind in zip(columns, kinds, strict=False):
                if kind != "X":
                    links[min(int(name[3:]), other), max(int(name[3:]), other)] = kind
    return links


def close_groups(links: Links) -> list[list[int]]:
    """The GPUs in groups that close connections hold together."""
    groups = [{gpu} for gpu in sorted({gpu for pair in links for gpu in pair})]
    for (a, b), kind in links.items():
        if _CLOSE.fullmatch(kind):
            joined = [group for group in groups if a in group or b in group]
            groups = [*(group for group in groups if group not in joined), set().union(*joined)]
    return sorted(map(sorted, groups))
