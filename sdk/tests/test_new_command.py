"""`dovetail plugins new`: a package that the index accepts as it stands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("kind", ["advantage"])
def test_a_new_package_has_a_manifest_without_drift(kind: str, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = run("dovetail.cli.main", "plugins", "new", kind, "acme_first")
    assert "install -e '.[test]' && pytest" in said
    package = tmp_path / "dovetail-acme-first"
    [manifest] = package.glob("src/*/dovetail-plugin.json")
    [plugin] = json.loads(manifest.read_text())["plugins"]
    assert (plugin["kind"], plugin["name"]) == (kind, "acme_first")
    assert "as described" in run("dovetail_sdk", "manifest", "--check", str(package))
