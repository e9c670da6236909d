"""Checkpoints that are whole or not there: one folder each, written aside, checked by hash, renamed at the end.

    checkpoints/step_00000120/model.pt       what every rank has alike: model, optimizer, and what the trainer adds (rank 0)
                              rank_0.pt ...  what is each rank's own: random states, where its data stand
                              sharded/       of a sharded model instead: torch.distributed.checkpoint's files, by all ranks
                              complete.json  the sizes and hashes of all of these, written last

`weights.py` reads single files, also those that others wrote.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .randomness import random_states, set_random_states

if TYPE_CHECKING:
    from ddpkit.rank.joining.process_group import Here

MODEL, SHARDED, COMPLETE = "model.pt", "sharded", "complete.json"

logger = logging.getLogger("ddpkit.rank")


class CheckpointError(RuntimeError):
    """A checkpoint is not whole, or is one of another training."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that is whole: its folder, the steps that were done, the number of ranks that wrote it."""

    folder: Path
    step: int
    world_size: int


class Checkpoints:
    """The checkpoints of one training in `folder`, which all ranks must see. The newest `keep` are kept.

    `save` and `load` are collectives: every rank calls them. A rank that is killed while it saves leaves a folder that
    ends in ".part", which nobody loads and the next `save` removes.
    """

    def __init__(self, folder: str | Path, here: Here, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"Checkpoints: keep={keep}; at least the newest one is kept.")
        self.folder, self._here, self._keep = Path(folder), here, keep

    def save(
        self, step: int, shared: dict[str, Any], own: dict[str, Any], sharded: dict[str, Any] | None = None
    ) -> Path | None:
        """Write a checkpoint of `step` and return its folder; None, with a word on every rank, where a rank could not write.

        Args:
            step: optimizer steps done so far; the checkpoint's name.
            shared: what all ranks have alike; rank 0 writes it. Tensors, numbers, strings, and lists and dicts of them.
            own: what each rank has of its own; its random states are added.
            sharded: the state of a sharded model and optimizer, as `torch.distributed.checkpoint` takes it.
        """
        final = self.folder / f"step_{step:08d}"
        part = final.with_name(f"{final.name}.part")
        written: dict[str, Any] = {"rank": self._here.rank, "files": {}, "error": None}
        try:
            part.mkdir(parents=True, exist_ok=True)
            if sharded is not None:
                self._save_sharded(part / SHARDED, sharded)
            if self._here.rank == 0:
                written["files"][MODEL] = _write(part / MODEL, {**shared, "step": step})
            name = _own_file(self._here.rank)
            written["files"][name] = _write(part / name, {**own, "random": random_states(self._here.device)})
        except OSError as error:
            written["error"] = str(error)
        # Also the moment at which all ranks know that all have written; nothing is renamed before.
        everyone = self._everyones(written)
        if bad := [w for w in everyone if w["error"]]:
            logger.error(
                "checkpoint of step %d dropped: rank %d could not write: %s", step, bad[0]["rank"], bad[0]["error"]
            )
            if self._here.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            self._everyones(None)
            return None
        if self._here.rank == 0:
            files = {name: told for w in everyone for name, told in w["files"].items()}
            self._complete(part, final, {"step": step, "world_size": self._here.world_size, "files": files})
        self._everyones(None)
        return final

    def newest(self) -> Found | None:
        """The newest checkpoint that is whole, the same for every rank; what is newer and broken is named in a warning."""
        found: list[Any] = [None]
        if self._here.rank == 0:
            found[0] = self._look_for_newest()
        if dist.is_initialized():
            dist.broadcast_object_list(found, src=0)
        return found[0]

    def load(self, found: Found) -> tuple[dict[str, Any], dict[str, Any]]:
        """What all ranks have alike, and what was this rank's own; its random states are set at once.

        With another number of ranks than wrote it, `own` is that of rank 0 and random states are left as they are: the
        training goes on from the same weights, with other data on each rank than it would have had.
        """
        shared = _read(found.folder / MODEL)
        same = found.world_size == self._here.world_size
        own = _read(found.folder / _own_file(self._here.rank if same else 0))
        random = own.pop("random")
        if same:
            set_random_states(random, self._here.device)
        else:
            logger.warning(
                "%s was written by %d ranks, and these are %d: weights and optimizer go on as they were, the data do not.",
                found.folder.name, found.world_size, self._here.world_size,
            )  # fmt: skip
        return shared, own

    def load_sharded(self, found: Found, state: dict[str, Any]) -> dict[str, Any]:
        """`state`, of a sharded model and optimizer, filled from `found`; any number of ranks may read what any number wrote."""
        import torch.distributed.checkpoint as sharding

        sharding.load(state, checkpoint_id=str(found.folder / SHARDED))
        return state

    def set_aside(self) -> Path | None:
        """Move all checkpoints that are there into a folder of their own, so that a training can begin afresh; rank 0 does."""
        aside = None
        if self._here.rank == 0 and (there := sorted(self.folder.glob("step_*"))):
            number = 1 + sum(1 for _ in self.folder.glob("earlier_*"))
            aside = self.folder / f"earlier_{number}"
            aside.mkdir()
            for each in there:
                each.rename(aside / each.name)
        self._everyones(None)
        return aside

    def _save_sharded(self, folder: Path, state: dict[str, Any]) -> None:
        import torch.distributed.checkpoint as sharding

        sharding.save(state, checkpoint_id=str(folder))

    def _complete(self, part: Path, final: Path, manifest: dict[str, Any]) -> None:
        """Write the list of files, give the folder its name, remove what is too old."""
        for file in sorted((part / SHARDED).rglob("*")):
            manifest["files"][str(file.relative_to(part))] = _told(file)
        _write_text(part / COMPLETE, json.dumps(manifest, indent=1))
        # A restart may come to the same step again; what it has then is the same, bit for bit.
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        _sync(self.folder)
        for old in [*self._there()[self._keep :], *self.folder.glob("step_*.part")]:
            shutil.rmtree(old, ignore_errors=True)

    def _there(self) -> list[Path]:
        """Folders of checkpoints, newest first, whole or not."""
        return sorted((p for p in self.folder.glob("step_*") if p.suffix != ".part"), reverse=True)

    def _look_for_newest(self) -> Found | None:
        for folder in self._there():
            try:
                manifest = checked(folder)
            except CheckpointError as error:
                logger.warning("checkpoint %s is skipped: %s", folder.name, error)
                continue
            return Found(folder, manifest["step"], manifest["world_size"])
        return None

    def _everyones(self, mine: Any) -> list[Any]:
        """`mine` of every rank, by rank; no rank is past this before all have come to it."""
        if not dist.is_initialized():
            return [mine]
        found: list[Any] = [None] * self._here.world_size
        dist.all_gather_object(found, mine)
        return found


def checked(folder: Path) -> dict[str, Any]:
    """The list of files in checkpoint `folder`, after each was read and compared with it.

    Raises:
        CheckpointError: a file is missing, shorter than it was, or changed.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
        files: dict[str, Any] = manifest["files"]
    except (OSError, ValueError, KeyError):
        raise CheckpointError(f"it has no readable {COMPLETE}, so its writing was not finished.") from None
    for name, told in files.items():
        path = folder / name
        if not path.exists():
            raise CheckpointError(f"{name} is missing.")
        if (size := path.stat().st_size) != told["bytes"]:
            raise CheckpointError(f"{name} has {size} bytes of {told['bytes']}.")
        if _told(path) != told:
            raise CheckpointError(f"{name} is not as it was written (another hash).")
    return manifest


def _own_file(rank: int) -> str:
    return f"rank_{rank}.pt"


def _write(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    with open(path, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # Of a full disk torch's writer says "unexpected pos"; what the system said stands behind it.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return _told(path)


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _told(path: Path) -> dict[str, Any]:
    """Size and hash of a file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return {"bytes": path.stat().st_size, "blake2b": digest}


def _sync(folder: Path) -> None:
    """Have the names in `folder` on the disk, where that can be asked for."""
    with contextlib.suppress(OSError):
        at = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(at)
        finally:
            os.close(at)
