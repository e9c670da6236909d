"""Packs run folders for tests/recorded/verdicts/: one archive for each family, without a word of the machine."""

from __future__ import annotations

import io
import shutil
import socket
import sys
import tarfile
from pathlib import Path

from ddpkit.runfolder import wire

# Nothing is judged by these.
DROPPED = (
    wire.RANK_PYTHON,
    wire.BALLAST,
    wire.PROGRESS,
    wire.STEP_VALUES,
    wire.FINAL_VALUES,
    wire.REPLICA_VALUES,
    wire.MEMORY,
)
SUFFIX = ".tar.xz"
REPOSITORY = Path(__file__).parents[1]


def keep(run: Path, script: Path, place: Path) -> None:
    """Copy the run folder to `place`, cleaned; `script` is the launched program."""
    shutil.rmtree(place, ignore_errors=True)
    words = words_of_the_machine(run, script)
    for source in sorted(run.rglob("*")):
        parts = source.relative_to(run).parts
        if wire.LOGS in parts[:-1]:
            # torchrun gives the folder a name by chance.
            at = parts.index(wire.LOGS) + 1
            parts = (*parts[:at], "job", *parts[at + 1 :])
        target = place.joinpath(*parts)
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif source.is_fifo():
            target.touch()
        elif source.is_file() and source.stat().st_size and source.name not in (*DROPPED, *wire.PICKLED):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(cleaned(source.read_bytes(), words))


def words_of_the_machine(run: Path, script: Path) -> dict[bytes, bytes]:
    """Each path and name of this machine that a run folder may hold, and what stands for it; the longest first."""
    found = {
        str(run): "<run>",
        str(script.parent): "<job>",
        sys.prefix: "<venv>",
        sys.base_prefix: "<python>",
        str(REPOSITORY): "<repository>",
        str(Path.home()): "<home>",
        socket.gethostname(): "<host>",
    }
    ordered = sorted(found, key=len, reverse=True)
    return {word.encode(): found[word].encode() for word in ordered}


def cleaned(content: bytes, words: dict[bytes, bytes]) -> bytes:
    """`content` with every word of the machine replaced."""
    for word, placeholder in words.items():
        content = content.replace(word, placeholder)
    return content


def pack(folders: Path, archive: Path) -> None:
    """Write all of `folders` into one archive; the same folders give the same bytes."""
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for path in sorted(folders.rglob("*")):
            entry = tarfile.TarInfo(str(path.relative_to(folders)))
            if path.is_dir():
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                packed.addfile(entry)
            else:
                content = path.read_bytes()
                entry.size = len(content)
                packed.addfile(entry, io.BytesIO(content))


def unpack(archive: Path, folders: Path) -> None:
    """The reverse of `pack`."""
    with tarfile.open(archive) as packed:
        packed.extractall(folders, filter="data")
