"""Install this project into the Python that runs this file: torch first, so that no CUDA packages come for nothing.

The Makefile and the Binder image call it; pyproject.toml says what is installed, constraints.txt which version of it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # TORCH_INDEX overrides it; empty means: ask no other index


def main() -> None:
    options = parse_options()
    refuse_system_python()
    began_s = time.monotonic()
    pins = chosen_pins(options.torch, options.newest)
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{pin}\n" for pin in pins), encoding="utf-8")
        install_torch(next(pin.partition("==")[2] for pin in pins if pin.startswith("torch==")))
        extras = f"[{options.extras}]" if options.extras else ""
        print(f"ddpkit{extras} and what it needs (the first time: minutes)", flush=True)
        more = ("-r", options.requirements) if options.requirements else ()
        if pip("-c", str(constraints), *more, "-e", f"{ROOT}{extras}") != 0:
            sys.exit("tools/install.py: pip could not install the project; its own words are above.")
    hide_nbgrader(Path(sys.prefix) / "etc" / "jupyter")
    print(f"installed: {size_mb(Path(sys.prefix)):,.0f} MB in {sys.prefix}, {time.monotonic() - began_s:.0f} s")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Install this project into the Python that runs this file.")
    parser.add_argument("--extras", default="lab,test", help="extras of pyproject.toml, by comma (default: lab,test)")
    parser.add_argument("--torch", help='a version other than the one pinned, or "oldest": the lower bound')
    parser.add_argument("--newest", action="store_true", help="newest versions of everything but torch, no pins")
    parser.add_argument("--requirements", help="a file of more that is installed, by its own versions")
    return parser.parse_args()


def refuse_system_python() -> None:
    in_environment = sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").exists()
    if not in_environment:
        sys.exit(
            f"tools/install.py: {sys.executable} is not in a virtual environment. "
            "Type `make lab`, or make one first: python3 -m venv .venv && .venv/bin/python tools/install.py"
        )


def chosen_pins(torch: str | None, newest: bool) -> list[str]:
    """The constraints to install with: those of the file, with the torch that was asked for."""
    lines = [line.strip() for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines()]
    pins = [line for line in lines if line and not line.startswith("#")]
    pinned_torch = next(pin for pin in pins if pin.startswith("torch=="))
    others = [] if newest else [pin for pin in pins if pin != pinned_torch]
    if torch == "oldest":
        torch = oldest_torch()
    return [f"torch=={torch}" if torch else pinned_torch, *others]


def oldest_torch() -> str:
    bound = re.search(r'"torch>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if bound is None:
        sys.exit('tools/install.py: pyproject.toml has no dependency of the form "torch>=VERSION".')
    return bound[1]


def install_torch(version: str) -> None:
    """Put the CPU build in where no GPU asks for more; elsewhere the main installation brings pip's own choice.

    The build is asked for by its full name, +cpu: one question to each index, and nothing downloaded in vain.
    """
    if sys.platform != "linux" or has_gpu() or installed_torch() == version:
        return
    print(f"torch {version}: no NVIDIA GPU on this machine, so the CPU build if it can be had", flush=True)
    cpu_build = f"torch=={version}+cpu"
    if pip("--no-deps", cpu_build, quiet=True) == 0:  # the machine's own pip set-up has it
        return
    index = os.environ.get("TORCH_INDEX", CPU_INDEX)
    if index and pip("--no-deps", "--retries", "1", "--index-url", index, cpu_build, quiet=True) == 0:
        return
    where = f"at {index} (unreachable, or without this build)" if index else "in pip's own set-up"
    print(f"No CPU build of torch {version} {where}: plain pip goes on, with several GB of CUDA packages.", flush=True)


def has_gpu() -> bool:
    """An NVIDIA GPU that CUDA can reach; under WSL the driver is a library beside /dev/dxg."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    if Path("/dev/dxg").exists() and Path("/usr/lib/wsl/lib/libcuda.so").exists():
        return True
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=30).stdout.startswith(b"GPU ")
    except (OSError, subprocess.TimeoutExpired):
        return False


def installed_torch() -> str | None:
    try:
        return importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def hide_nbgrader(settings: Path) -> None:
    """Keep nbgrader's menus and servers out of this environment's JupyterLab; it is here to make the exercises."""
    servers = ("formgrader", "validate_assignment", "assignment_list", "course_list")
    off = {f"nbgrader.server_extensions.{name}": False for name in servers}
    for place, found in (
        ("labconfig/page_config.json", {"disabledExtensions": {"@jupyter/nbgrader": True}}),
        # Read after nbgrader's own file, by the order of their names.
        ("jupyter_server_config.d/zz_no_nbgrader.json", {"ServerApp": {"jpserver_extensions": off}}),
    ):
        path = settings / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def pip(*arguments: str, quiet: bool = False) -> int:
    """`pip install` for this Python; `quiet` hides its errors too, for a question that may be answered no."""
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=quiet, stdin=subprocess.DEVNULL).returncode


def size_mb(folder: Path) -> float:
    """Disk space in millions of bytes, as `du` counts it, links not followed."""
    return sum(path.lstat().st_blocks for path in folder.rglob("*")) * 512 / 1e6


if __name__ == "__main__":
    main()
