"""Collect in build/gpu-kit what a machine with a GPU and torch, but no network, lacks for `tools/gpu_day.py`.

That is wheels for its Python, this commit's own wheel, and a newer NCCL with the code of other GPUs blanked out.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KIT = ROOT / "build" / "gpu-kit"
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 18, 17)] + [
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]
# What ddpkit and nbval need, beyond what comes with torch, numpy, pandas, pytest, rich, typer and the like.
LACKING = (
    "ahocorasick_rs anywidget asttokens comm debugpy executing fastjsonschema inotify-simple ipykernel ipython "
    "ipython_pygments_lexers ipywidgets jedi jsonschema jsonschema-specifications jupyter_client jupyter_core "
    "jupyterlab_widgets matplotlib-inline nbclient nbformat nbval nest-asyncio2 parso pexpect platformdirs prompt_toolkit "
    "psygnal ptyprocess pure_eval py-spy pyzmq referencing rpds-py stack-data tornado traitlets wcwidth widgetsnbextension"
).split()
# From 2.30.3 on, NCCL can be told to take two ranks of one host on one GPU. torch 2.11 brings 2.28.9, which refuses.
NCCL = "nvidia-nccl-cu13==2.30.7"
NCCL_LIBRARY = "nvidia/nccl/lib/libnccl.so.2"
GPU_CODE = 90
# What may travel to the machine: the files of this checkout, and the kit.
MOST_MIB = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without-nccl", action="store_true", help="leave the newer NCCL out, a download of 216 MB")
    asked = parser.parse_args()
    shutil.rmtree(KIT, ignore_errors=True)
    KIT.mkdir(parents=True)
    download(KIT, *pinned(LACKING))
    own_wheel(KIT)
    if not asked.without_nccl:
        newer_nccl(KIT)
    say_size()


def pinned(names: list[str]) -> list[str]:
    """Each name with the version that constraints.txt has for it."""
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, _, version = line.partition("==")
        pins[name.lower()] = version
    return [f"{name}=={pins[name.lower()]}" for name in names]


def download(folder: Path, *requirements: str) -> None:
    """Fetch the wheel of each requirement, and of no other, for the machine's Python."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    target = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *platforms]
    pip("download", "--no-deps", *target, "-d", str(folder), *requirements)


def own_wheel(folder: Path) -> None:
    """ddpkit's wheel, built of the commit that is checked out."""
    commit = git("rev-parse", "--short=12", "HEAD").decode().strip()
    if git("status", "--porcelain", "--", "ddpkit", "pyproject.toml"):
        print(f"gpu-kit: ddpkit has changes that are not committed; the wheel is that of {commit}.", flush=True)
    with tempfile.TemporaryDirectory() as source:
        subprocess.run(["tar", "-x", "-C", source], input=git("archive", "HEAD"), check=True)
        pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), source)
    (folder / "commit.txt").write_text(f"{commit}\n", encoding="utf-8")


def newer_nccl(folder: Path) -> None:
    """NCCL's library, cut down to the code of one kind of GPU; left out, aloud, where it cannot be had."""
    if shutil.which("strip") is None:
        print("gpu-kit: there is no `strip` here (binutils), so the newer NCCL is left out.", flush=True)
        return
    with tempfile.TemporaryDirectory() as work:
        download(Path(work), NCCL)
        wheel = next(Path(work).glob("*.whl"))
        library = Path(zipfile.ZipFile(wheel).extract(NCCL_LIBRARY, work))
        code = bytearray(library.read_bytes())
        for start, size in blank_spans(code, sections(library)):
            code[start : start + size] = bytes(size)
        library.write_bytes(code)
        subprocess.run(["strip", "--strip-debug", str(library)], check=True)
        packed = folder / f"libnccl-{NCCL.partition('==')[2]}.so.xz"
        packed.write_bytes(lzma.compress(library.read_bytes()))


def sections(library: Path) -> dict[str, tuple[int, int]]:
    """Offset and size of each section of a 64-bit ELF file, by name."""
    data = library.read_bytes()
    table, entry_size, count, names_index = (
        struct.unpack_from("<Q", data, 0x28)[0],
        *struct.unpack_from("<HHH", data, 0x3A),
    )
    rows = []
    for i in range(count):
        name, _kind, _flags, _address, offset, size = struct.unpack_from("<IIQQQQ", data, table + i * entry_size)
        rows.append((name, offset, size))
    names = rows[names_index][1]
    found = {}
    for name, offset, size in rows:
        found[data[names + name : data.index(b"\0", names + name)].decode()] = (offset, size)
    return found


def blank_spans(code: bytearray, named: dict[str, tuple[int, int]]) -> list[tuple[int, int]]:
    """Where the code of other GPUs is: all that is only for linking, and each entry of the fat binaries but GPU_CODE's."""
    spans = [named["__nv_relfatbin"]]
    at, size = named[".nv_fatbin"]
    end = at + size
    while at + 16 <= end:
        magic, _version, header, length = struct.unpack_from("<IHHQ", code, at)
        if magic != 0xBA55ED50:
            at += 8
            continue
        entry, at = at + header, at + header + length
        while entry < at:
            _kind, _, entry_header, payload = struct.unpack_from("<HHIQ", code, entry)
            architecture = struct.unpack_from("<I", code, entry + 28)[0]
            if architecture != GPU_CODE:
                spans.append((entry + entry_header, payload))
            entry += entry_header + payload
    return spans


def say_size() -> None:
    """What travels, kit and checkout together.

    Raises:
        SystemExit: it is more than may travel.
    """
    kit = sum(path.stat().st_size for path in KIT.iterdir()) / 2**20
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").decode().split("\0")
    paths = [ROOT / name for name in listed if name]
    tree = sum(path.lstat().st_size for path in paths if path.exists()) / 2**20
    wheels = len(list(KIT.glob("*.whl")))
    print(
        f"gpu-kit: {wheels} wheels, {kit:.1f} MiB in {KIT.relative_to(ROOT)}; with the checkout {kit + tree:.1f} MiB."
    )
    if kit + tree > MOST_MIB:
        sys.exit(f"gpu-kit: that is more than the {MOST_MIB} MiB that may travel; try --without-nccl.")


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", *words], cwd=ROOT, check=True)


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout


if __name__ == "__main__":
    main()
