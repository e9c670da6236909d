"""The project's files agree: one list of dependencies, every one pinned, every road into the project built on them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [Requirement(text) for group in (PROJECT["dependencies"], *EXTRAS.values()) for text in group]
OTHER_LISTS = ("requirements*.txt", "requirements*.in", "Pipfile*", "setup.py", "setup.cfg", "poetry.lock", "uv.lock")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def pins() -> dict[str, Version]:
    lines = [line for line in text("constraints.txt").splitlines() if line and not line.startswith("#")]
    split = [line.split("==") for line in lines]
    return {canonicalize_name(name): Version(version) for name, version in split}


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_every_dependency_has_a_pin_that_satisfies_it(requirement: Requirement) -> None:
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_torch_is_pinned_without_a_build_tag() -> None:
    assert pins()["torch"].local is None, "torch==X+cpu would refuse the CUDA build of the same release"


def test_constraints_hold_exact_versions_only() -> None:
    for line in text("constraints.txt").splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), line


def conda_dependencies() -> tuple[list[str], list[str]]:
    """What environment.yml asks of conda, and what it asks of pip."""
    listed = yaml.safe_load(text("environment.yml"))["dependencies"]
    from_pip = next(entry["pip"] for entry in listed if isinstance(entry, dict))
    return [entry for entry in listed if isinstance(entry, str)], from_pip


def test_conda_brings_only_python_and_pip() -> None:
    from_conda, _ = conda_dependencies()
    python, pip = from_conda
    assert pip == "pip"
    assert SpecifierSet(python.removeprefix("python")) == SpecifierSet(PROJECT["requires-python"])


def test_conda_takes_the_rest_from_the_project() -> None:
    _, from_pip = conda_dependencies()
    assert from_pip == ["-c constraints.txt", f"-e .[{','.join(EXTRAS)}]"]


def test_the_makefile_asks_for_the_same_python() -> None:
    bounds = re.search(r"\((\d+), (\d+)\) <= sys.version_info < \((\d+), (\d+)\)", text("Makefile"))
    assert bounds is not None
    low, low_minor, high, high_minor = bounds.groups()
    assert SpecifierSet(f">={low}.{low_minor},<{high}.{high_minor}") == SpecifierSet(PROJECT["requires-python"])


def test_the_installer_takes_every_extra() -> None:
    assert f'default="{",".join(EXTRAS)}"' in text("tools/install.py")


def test_the_installer_finds_the_oldest_torch() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import install
    finally:
        sys.path.pop(0)
    torch = next(requirement for requirement in REQUIREMENTS if requirement.name == "torch")
    assert str(torch.specifier) == f">={install.oldest_torch()}"
    assert install.chosen_pins("oldest", newest=False)[0] == f"torch=={install.oldest_torch()}"
    assert len(install.chosen_pins(None, newest=False)) == len(pins())


def test_the_installer_leaves_a_system_python_alone() -> None:
    base = Path(sys.base_prefix) / "bin" / "python3"
    if not base.exists() or (Path(sys.base_prefix) / "conda-meta").exists():
        pytest.skip("no plain system Python to try it with")
    guarded = {**os.environ, "PIP_REQUIRE_VIRTUALENV": "1"}  # should the refusal fail one day
    tried = subprocess.run([base, ROOT / "tools" / "install.py"], env=guarded, capture_output=True, text=True)
    assert tried.returncode == 1
    assert "is not in a virtual environment" in tried.stderr


def test_no_other_list_of_dependencies() -> None:
    hidden = [path for pattern in OTHER_LISTS for path in files(pattern)]
    assert not hidden, f"dependencies belong in pyproject.toml alone: {hidden}"
    assert files("environment*.y*ml") == [ROOT / "environment.yml"]


def test_nothing_installs_packages_by_name() -> None:
    installs = re.compile(r"(?:pip|conda|mamba|uv pip) install (?!-c |-e |-r |\.)\S+")
    searched = [*files("*.ipynb"), *files("*.sh"), *files("Makefile"), ROOT / ".ci/run", *(ROOT / "binder").iterdir()]
    for path in searched:
        assert not installs.search(path.read_text(encoding="utf-8")), f"{path} installs packages of its own"


def files(pattern: str) -> list[Path]:
    """Files of the project itself: environments, builds and run folders left out."""
    apart = {".ddpkit", ".git", "build", "dist", "node_modules", "site-packages"}
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in apart and not name.startswith(".venv")]
        found += [Path(folder, name) for name in names if Path(name).match(pattern)]
    return sorted(found)


def test_binder_uses_the_installer() -> None:
    assert sorted(path.name for path in (ROOT / "binder").iterdir()) == ["postBuild", "runtime.txt"]
    assert "python tools/install.py --extras lab\n" in text("binder/postBuild")
    assert text("binder/postBuild").startswith("#!")
    python = text("binder/runtime.txt").strip().removeprefix("python-")
    assert SpecifierSet(PROJECT["requires-python"]).contains(python)


@pytest.mark.parametrize("name", ["binder/postBuild", ".ci/run"])
def test_scripts_can_be_started(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)


def test_devcontainer_uses_make() -> None:
    lines = text(".devcontainer/devcontainer.json").splitlines()
    settings = json.loads("\n".join(line for line in lines if not line.lstrip().startswith("//")))
    assert settings["postCreateCommand"] == "make install"
    python = re.search(r"python:(\d+\.\d+)", settings["image"])
    assert python is not None
    assert SpecifierSet(PROJECT["requires-python"]).contains(python[1])


def test_make_alone_lists_the_commands() -> None:
    listed = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for command in ("make lab", "make test ", "make check", "make soak"):
        assert command in listed


def test_make_refuses_an_unfit_python_in_one_sentence(tmp_path: Path) -> None:
    command = ["make", "-s", "install", f"VENV={tmp_path / 'venv'}", "PYTHON=/nowhere/python3"]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode != 0
    assert 'needs Python 3.11 to 3.14, and "/nowhere/python3" is' in refused.stdout


@pytest.mark.xdist_group("project")
def test_tests_of_one_group_stay_together(request: pytest.FixtureRequest) -> None:
    # pytest-xdist knows a group by what it has put behind a test's name.
    assert request.node.nodeid.endswith("@project") == request.config.getoption("loadgroup", False)
