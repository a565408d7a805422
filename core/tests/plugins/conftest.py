"""The little distributions of `small_packages`, on this process's path and in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from small_packages import (
    TRACKER,
    build,
    install,
    installed,
    plugin,
    tracker_project,
    world,
    write_project,
)

__all__ = ["installed", "world"]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def python(world: Path, tmp_path: Path) -> Run:
    """Run Python in a process of its own, in an empty folder, with the world installed."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(world), **variables},
            cwd=tmp_path,
            check=False,
        )

    return run


@pytest.fixture
def dovetail(python: Run) -> Run:
    """Run the `dovetail` command there."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return python("-m", "dovetail.cli.main", *arguments, **variables)

    return run


@pytest.fixture
def editable_install(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with an editable install of `acme-live` (tracker `live`), and the package's source."""
    project = tracker_project(tmp_path, "acme-live", "live", TRACKER.format(cls="T", name="live"))
    target = tmp_path / "site"
    wheel = build(project, tmp_path / "wheels", editable=True)
    install([wheel], target)
    # As `pip install -e` records it.
    [info] = target.glob("*.dist-info")
    (info / "direct_url.json").write_text(
        json.dumps({"url": project.as_uri(), "dir_info": {"editable": True}})
    )
    return target, project / "src" / "acme_live"


ARENAS = {
    "base.py": "from dovetail.interfaces import Plugin\n\n\nclass Arena(Plugin):\n    interface_api = '1.2'\n",
    "plugin.py": "from acme_arenas.base import Arena\n\n\nclass Maze(Arena):\n    name = 'maze'\n    api = '>=1.0,<2'\n",
}


@pytest.fixture
def arenas(tmp_path: Path) -> Callable[..., Path]:
    """A function that installs a distribution with these kinds in its manifest, and a plugin of the kind `arena`; returns the folder."""

    def make(*kinds: Mapping[str, str], declared: str = "arena", api: str = ">=1.0,<2") -> Path:
        project = write_project(
            tmp_path,
            "acme-arenas",
            ARENAS,
            {
                "dovetail.kinds": {declared: "acme_arenas.base:Arena"},
                "dovetail.arena": {"maze": "acme_arenas.plugin:Maze"},
            },
            [plugin("arena", "maze", "acme_arenas.plugin:Maze", api=api)],
        )
        manifest = project / "src" / "acme_arenas" / "dovetail-plugin.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "kinds": kinds}))
        install([build(project, tmp_path / "wheels")], tmp_path / "site")
        return tmp_path / "site"

    return make
