"""Print constraints.txt: the exact versions, in the Python that runs this file, of all that pyproject.toml pulls in."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
HEADER = (
    "# Exact versions that the stored outputs were made with. Regenerate with `make constraints`, by the oldest Python that\n"
    "# has to install them (Debian 12 has 3.11.2, and some packages need a newer 3.11); do not edit.\n"
)


def main() -> None:
    print(HEADER + "\n".join(sorted(pins(), key=str.lower)))


def pins() -> set[str]:
    """name==version for every distribution reached from pyproject.toml, all its extras included."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    wanted = [Requirement(text) for group in (project["dependencies"], *extras) for text in group]
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    while wanted:
        requirement = wanted.pop()
        for extra in ("", *sorted(requirement.extras)):
            key = (canonicalize_name(requirement.name), extra)
            if key in seen or not applies(requirement):
                continue
            seen.add(key)
            distribution = importlib.metadata.distribution(requirement.name)
            # Without the local tag (+cpu), so that either build of torch satisfies the pin.
            found.add(f"{distribution.metadata['Name']}=={distribution.version.partition('+')[0]}")
            wanted += needed_by(distribution, extra)
    return found


def applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def needed_by(distribution: importlib.metadata.Distribution, extra: str) -> list[Requirement]:
    """What `distribution` asks for on this machine when `extra` of it is wanted ("" for none), markers settled."""
    needed = []
    for text in distribution.requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            requirement.marker = None
            needed.append(requirement)
    return needed


if __name__ == "__main__":
    main()
