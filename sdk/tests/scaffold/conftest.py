"""Packages that `dovetail plugins new` writes, built and installed into a clean environment on top of this one."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest
from hatchling.builders.wheel import WheelBuilder

from dovetail_sdk.scaffold import KINDS, new_plugin

MAIN = ("rollout", "engine", "advantage", "policy_loss", "reward_function")
"""What every test run writes and runs; the nightly one does so for all kinds."""


@attrs.frozen
class Environment:
    """A virtual environment with the packages of this environment and the written packages."""

    python: str
    packages: Mapping[str, Path]
    """Kind → source folder."""

    def run(self, *arguments: str, cwd: Path, expected: int = 0) -> str:
        """Run the environment's Python with these arguments, and return its output."""
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHON"))}
        done = subprocess.run(
            [self.python, *arguments],
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
            env={**variables, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == expected, done.stdout + done.stderr
        return done.stdout


def install(home: Path, kinds: tuple[str, ...]) -> Environment:
    """Write a package of each kind, build its wheel, and install it."""
    paths = list(sys.path)
    packages = {kind: new_plugin(kind, f"my_{kind}", home) for kind in kinds}
    # Deriving a manifest imports the package, and the next environment has other packages of these names.
    sys.path[:] = paths
    for module in [name for name in sys.modules if name.startswith("dovetail_my_")]:
        del sys.modules[module]
    wheels = [
        str(wheel)
        for package in packages.values()
        for wheel in WheelBuilder(str(package)).build(
            directory=str(home / "wheels"), versions=["standard"]
        )
    ]
    venv.create(home / "env", with_pip=False, symlinks=True)
    python = home / "env" / "bin" / "python"
    [site] = (home / "env" / "lib").glob("python*/site-packages")
    # `addsitedir` reads the .pth files of the base environment, which hold editable installs.
    base = sysconfig.get_paths()["purelib"]
    (site / "base.pth").write_text(f"import site; site.addsitedir({base!r})\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run(
        [*pip, "--no-index", "--no-compile", "--disable-pip-version-check", *wheels], check=True
    )
    return Environment(str(python), packages)


@pytest.fixture(scope="session")
def main(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The main kinds, installed."""
    return install(tmp_path_factory.mktemp("main"), MAIN)


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Every kind, installed."""
    return install(tmp_path_factory.mktemp("everything"), KINDS)
