"""What `dovetail plugins new` writes builds, installs, passes its own tests, and is listed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.errors import PluginError
from dovetail_sdk.scaffold import KINDS, new_plugin


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One package of every kind, built, and installed into a folder of its own."""
    home = tmp_path_factory.mktemp("scaffold")
    packages = [new_plugin(kind, f"my_{kind}", home) for kind in KINDS]
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    site = home / "site"
    run(*pip, "--no-build-isolation", "--target", str(site), *map(str, packages), cwd=home)
    return home, site


def test_every_written_package_passes_its_own_tests(installed):
    home, site = installed
    suites = [str(path) for path in home.glob("dovetail-my-*/tests")]
    assert len(suites) == len(KINDS)
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
    )
    printed = run(*command, *suites, cwd=home, PYTHONPATH=str(site))
    assert "passed" in printed


def test_every_written_package_is_listed_and_loads(installed):
    home, site = installed
    command = (sys.executable, "-m", "dovetail.cli.main", "plugins", "list", "--json", "--probe")
    listed = json.loads(run(*command, cwd=home, PYTHONPATH=str(site)))["plugins"]
    mine = {p["kind"]: p for p in listed if p["name"].startswith("my_")}
    assert set(mine) == set(KINDS)
    for plugin in mine.values():
        assert (plugin["state"], plugin["probe"]) == ("compatible", "loadable"), plugin


def test_what_is_written_is_clean_and_its_manifest_has_not_drifted(installed):
    home, _ = installed
    packages = sorted(str(path) for path in home.glob("dovetail-my-*"))
    run(sys.executable, "-m", "ruff", "check", *packages, cwd=home)
    run(sys.executable, "-m", "ruff", "format", "--check", *packages, cwd=home)
    run(sys.executable, "-m", "dovetail_sdk", "manifest", "--check", *packages, cwd=home)


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("advantages", "mine", "did you mean advantage"),
        ("advantage", "My-Name", "lower-case"),
    ],
)
def test_a_wrong_kind_or_name_is_refused(tmp_path, kind, name, words):
    with pytest.raises(PluginError, match=words):
        new_plugin(kind, name, tmp_path)


def test_an_existing_directory_is_left_alone(tmp_path):
    new_plugin("advantage", "mine", tmp_path)
    with pytest.raises(PluginError, match="exists already"):
        new_plugin("advantage", "mine", tmp_path)
