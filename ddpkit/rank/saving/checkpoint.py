"""Checkpoints that are whole or not there: one folder each, written under another name, hashed, renamed at the end.

checkpoints/step_00000120/model.pt       what all ranks share: model, optimizer, and what the caller adds (by rank 0)
                          rank_0.pt ...  what each rank has of its own: random states, its place in the data
                          sharded/       a sharded model: the files of torch.distributed.checkpoint, by all ranks
                          complete.json  the sizes and hashes of all these files, written last
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
from typing import Any

import torch

from ddpkit.rank.guarding.guard import everyones
from ddpkit.rank.joining.process_group import Here

from .randomness import random_states, set_random_states

MODEL, SHARDED, COMPLETE = "model.pt", "sharded", "complete.json"

logger = logging.getLogger("ddpkit.rank")


class CheckpointError(RuntimeError):
    """A checkpoint is not whole, or belongs to another run."""


@dataclass(frozen=True)
class Found:
    """A whole checkpoint: its folder, the steps done, the number of ranks that wrote it."""

    folder: Path
    step: int
    world_size: int


class Checkpoints:
    """The checkpoints of one training run in `folder`, which all ranks must see. The newest `keep` are kept.

    Every rank calls `save`, `newest` and `load`. A rank that is killed while it saves leaves a folder that ends in ".part";
    nobody loads it, and the next `save` removes it.
    """

    def __init__(self, folder: str | Path, here: Here, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"Checkpoints: keep={keep}; at least the newest one is kept.")
        self.folder, self._here, self._keep = Path(folder), here, keep

    def save(
        self, step: int, shared: dict[str, Any], own: dict[str, Any], sharded: dict[str, Any] | None = None
    ) -> Path | None:
        """Write a checkpoint of `step` and return its folder; None, with an error in every log, if a rank could not write.

        Args:
            step: optimizer steps done so far.
            shared: the same on all ranks; rank 0 writes it. Tensors, numbers, strings, and lists and dicts of them.
            own: what each rank has of its own; its random states are added.
            sharded: the state of a sharded model and optimizer, as `torch.distributed.checkpoint` takes it.
        """
        final = self.folder / f"step_{step:08d}"
        part = final.with_name(f"{final.name}.part")
        written: dict[str, Any] = {"rank": self._here.rank, "files": {}, "error": None}
        try:
            part.mkdir(parents=True, exist_ok=True)
            if sharded is not None:
                from torch.distributed import checkpoint as sharding

                sharding.save(sharded, checkpoint_id=str(part / SHARDED))
            if self._here.rank == 0:
                written["files"][MODEL] = _write(part / MODEL, {**shared, "step": step})
            name = f"rank_{self._here.rank}.pt"
            written["files"][name] = _write(part / name, {**own, "random": random_states(self._here.device)})
        except OSError as error:
            written["error"] = str(error)
        # Nothing is renamed before all ranks have written.
        everyone = everyones(written)
        bad = [w for w in everyone if w["error"]]
        if bad:
            rank, why = bad[0]["rank"], bad[0]["error"]
            logger.error("checkpoint of step %d dropped: rank %d could not write: %s", step, rank, why)
        if self._here.rank == 0 and bad:
            shutil.rmtree(part, ignore_errors=True)
        elif self._here.rank == 0:
            files = {name: told for w in everyone for name, told in w["files"].items()}
            self._complete(part, final, {"step": step, "world_size": self._here.world_size, "files": files})
        everyones(None)
        return None if bad else final

    def newest(self) -> Found | None:
        """The newest whole checkpoint, the same for every rank; a warning names newer ones that are broken."""
        found: Found | None = everyones(self._look_for_newest() if self._here.rank == 0 else None)[0]
        return found

    def load(self, found: Found) -> tuple[dict[str, Any], dict[str, Any]]:
        """What all ranks share, and what this rank has of its own; its random states are set.

        If another number of ranks wrote it, `own` is that of rank 0, and random states are left as they are: the training
        goes on from the same weights, but each rank gets other data than it would have had.
        """
        shared = _read(found.folder / MODEL)
        same = found.world_size == self._here.world_size
        own = _read(found.folder / f"rank_{self._here.rank if same else 0}.pt")
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
        """`state`, of a sharded model and optimizer, filled from `found`; the number of ranks may differ."""
        from torch.distributed import checkpoint as sharding

        sharding.load(state, checkpoint_id=str(found.folder / SHARDED))
        return state

    def set_aside(self) -> Path | None:
        """Move all checkpoints into a folder of their own, so that training can begin afresh. Every rank calls this."""
        aside = None
        if self._here.rank == 0 and (there := sorted(self.folder.glob("step_*"))):
            number = 1 + sum(1 for _ in self.folder.glob("earlier_*"))
            aside = self.folder / f"earlier_{number}"
            aside.mkdir()
            for each in there:
                each.rename(aside / each.name)
        everyones(None)
        return aside

    def _complete(self, part: Path, final: Path, manifest: dict[str, Any]) -> None:
        """Write the list of files, rename the folder, remove what is too old."""
        for path in sorted((part / SHARDED).rglob("*")):
            manifest["files"][str(path.relative_to(part))] = _told(path)
        with open(part / COMPLETE, "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        # A restart may come to the same step again, with the same state, bit for bit.
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        _sync(self.folder)
        for old in [*self._there()[self._keep :], *self.folder.glob("step_*.part")]:
            shutil.rmtree(old, ignore_errors=True)

    def _there(self) -> list[Path]:
        """The folders of checkpoints, newest first, whole or not."""
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


def checked(folder: Path) -> dict[str, Any]:
    """The contents of `complete.json` in `folder`, after a check of each file."""
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


def _write(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    with open(path, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # On a full disk torch's writer says "unexpected pos"; the system's own error is behind it.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return _told(path)


def _read(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _told(path: Path) -> dict[str, Any]:
    """Size and hash of a file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return {"bytes": path.stat().st_size, "blake2b": digest}


def _sync(folder: Path) -> None:
    """Write the names in `folder` to the disk, if the system can."""
    with contextlib.suppress(OSError):
        at = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(at)
        finally:
            os.close(at)
