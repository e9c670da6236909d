"""`on_gpu`: a failure as it was recorded on a machine with a GPU, for readers who have none."""

from __future__ import annotations

import difflib

from ddpkit.diagnosis.pages import NoSuchPage
from ddpkit.run import Run

from .lab import CATALOG

RECORDED = "gpu.zip"


def on_gpu(name: str) -> Run | None:
    """The run of failure `name` that was recorded on a GPU; its first note says on which, with which versions, by which ranks.

    None, and a sentence, where none has been recorded yet.

    Raises:
        NoSuchPage: the catalog has no failure of that name.
    """
    known = [folder.name for folder in CATALOG.iterdir()]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
        meant = f" Did you mean {' or '.join(near)}?" if near else " `ddpkit explain` lists all."
        raise NoSuchPage(f"on_gpu: the catalog has no failure {name!r}.{meant}")
    bundle = CATALOG / name / RECORDED
    if not bundle.exists():
        print(f"{name}: no run on a GPU has been recorded yet.")
        return None
    return Run.from_folder(bundle)
