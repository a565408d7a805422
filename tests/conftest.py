"""Fixtures for what spans packages: the built wheels, and a clean environment with them."""

from __future__ import annotations

import site
import subprocess
import sys
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a freshly built wheel of every package."""
    dist = tmp_path_factory.mktemp("dist")
    packages = [ROOT, ROOT / "core", ROOT / "sdk"]
    packages += sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
    for package in packages:
        list(WheelBuilder(str(package)).build(directory=str(dist), versions=["standard"]))
    return dist


@pytest.fixture(scope="session")
def clean_python(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment: ours from wheels, the heavy third-party packages by one path."""
    home = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    command += ["--no-index", "--no-deps", *map(str, sorted(wheels.glob("*.whl")))]
    subprocess.run(command, check=True, cwd=wheels)
    # A path in a .pth file is searched, but the .pth files below it (our editable installs) are not read.
    [packages] = home.glob("lib/python*/site-packages")
    (packages / "third_party.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python
