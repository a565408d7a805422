"""A full, unshared installation: every wheel with every dependency from the package index."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_everything_installs_into_an_environment_of_its_own(
    wheels: Path, root: Path, tmp_path: Path
) -> None:
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    python = str(home / "bin" / "python")
    command = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        str(root / "constraints-cpu.txt"),
    ]
    command += ["--find-links", str(wheels), "dovetail-rl", "dovetail-sdk"]
    subprocess.run(command, check=True, cwd=tmp_path)
    listing = subprocess.run(
        [str(home / "bin" / "dovetail"), "doctor", "--json"],
        check=True, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    plugins = json.loads(listing.stdout)["plugins"]
    assert len(plugins) > 20
    assert {plugin["status"] for plugin in plugins} == {"loadable"}
    used = sum(path.lstat().st_blocks * 512 for path in home.rglob("*")) >> 20
    assert used <= 1500, f"{used} MB with the CPU build of torch; expected at most 1500"
