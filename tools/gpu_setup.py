"""Installs the kit on the machine of the day, wakes torch up meanwhile, and says what the environment of a step is."""

from __future__ import annotations

import contextlib
import lzma
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpu_kit import KIT, PYTHON

# Kept between two calls, where the machine is.
SITE = Path(tempfile.gettempdir()) / "gpu-day-site"
WAKES_WITHIN_S = 60
WAKE = "import torch, torch.distributed.run, torch._dynamo, torch.nn.parallel"


@dataclass(frozen=True)
class Setup:
    """Where the kit is, "" where this Python has what is needed; `nccl` is the newer NCCL's library, "" without."""

    site: str
    env: dict[str, str]
    nccl: str
    commit: str


def prepare(dry: bool) -> Setup:
    """Install the kit beside the first import of torch, which reads gigabytes from a cold disk."""
    waking = subprocess.Popen([sys.executable, "-c", WAKE], stderr=subprocess.DEVNULL)
    fits = f"{sys.version_info[0]}.{sys.version_info[1]}" == PYTHON and any(KIT.glob("*.whl"))
    if not fits and not dry:
        sys.exit(
            f"gpu_day: there is no kit for Python {sys.version.split()[0]} in {KIT}; make gpu-kit, for Python {PYTHON}."
        )
    env = {"GPU_DAY_DRY": "1"} if dry else {}
    env["TORCHINDUCTOR_CACHE_DIR"] = str(SITE / "inductor")
    commit = (KIT / "commit.txt").read_text().strip() if (KIT / "commit.txt").exists() else "not known"
    nccl = ""
    if fits:
        install()
        nccl = unpacked_nccl()
        env |= {"PYTHONPATH": joined(SITE, "PYTHONPATH"), "PATH": joined(SITE / "bin", "PATH")}
        env |= {"JUPYTER_PATH": joined(SITE / "share" / "jupyter", "JUPYTER_PATH"), "GPU_DAY_NCCL": nccl}
    with contextlib.suppress(subprocess.TimeoutExpired):
        waking.wait(WAKES_WITHIN_S)
    return Setup(str(SITE) if fits else "", env, nccl, commit)


def install() -> None:
    """Put the wheels into SITE, unless the very same are there."""
    wheels = sorted(str(path) for path in KIT.glob("*.whl"))
    stamp = SITE / "installed.txt"
    if stamp.exists() and stamp.read_text() == "\n".join(wheels):
        return
    words = ["-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(SITE)]
    subprocess.run([sys.executable, "-m", "pip", "install", *words, *wheels], check=True)
    stamp.write_text("\n".join(wheels))


def unpacked_nccl() -> str:
    """The newer NCCL as a file that can be loaded; "" where the kit has none."""
    packed = next(KIT.glob("libnccl-*.so.xz"), None)
    if packed is None:
        return ""
    library = SITE / "nccl" / packed.stem
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        library.write_bytes(lzma.decompress(packed.read_bytes()))
    return str(library)


def joined(folder: Path, name: str) -> str:
    return os.pathsep.join(filter(None, [str(folder), os.environ.get(name, "")]))
