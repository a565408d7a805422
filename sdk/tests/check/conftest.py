"""Small distributions to check, installed into one folder: a sound one, and one with each kind of error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

from dovetail.plugins.index import default_index
from dovetail_sdk.check.run import check_plugins
from dovetail_sdk.scaffold import new_plugin

DECLARED = '''
"""Suites."""

from dovetail_sdk.testing.conformance import AdvantageConformance
from dovetail_acme_sound.config import AcmeSoundConfig
from dovetail_acme_sound.plugin import AcmeSound


class TestSound(AdvantageConformance):
    """The suite."""

    plugin = AcmeSound
    config = AcmeSoundConfig(name="acme_sound", scale=1.0)
    weights = (1.0, 2.0)
    expected_failures = {"test_a_group_thinned_to_one_gives_zero": "it gives 1 there, on purpose"}

    def test_of_its_own(self):
        assert self.make().config.scale == 1.0
'''
CRASH = "        import os\n\n        os._exit(7)\n"


def edit(package: Path, *changes: tuple[str, str], file: str = "plugin.py") -> None:
    """Replace texts in one of a package's modules."""
    [place] = package.glob(f"src/*/{file}")
    text = place.read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    place.write_text(text)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all these distributions, installed from their source folders."""
    home = tmp_path_factory.mktemp("checked")
    packages = {
        name: new_plugin("advantage", f"acme_{name}", home)
        for name in ("sound", "missing", "signature", "config", "manifest", "nothing", "crash")
    }
    packages["formula"] = new_plugin("objective", "acme_formula", home)
    # Writing the manifests has imported the packages from their source folders.
    for name in [name for name in sys.modules if name.startswith("dovetail_acme_")]:
        del sys.modules[name]
    sys.path[:] = [place for place in sys.path if not place.startswith(str(home))]
    returns = "return Advantages(advantages=advantages_N.astype(np.float32))"
    alone = (
        "advantages_N = np.where(groups.sizes_G[groups.index_N] < 2, 1.0, advantages_N)\n        "
    )
    edit(packages["sound"], (returns, alone + returns))
    (packages["sound"] / "src" / "dovetail_acme_sound" / "conformance.py").write_text(DECLARED)
    edit(packages["missing"], ("def estimate(", "def estimated("))
    edit(packages["signature"], ("columns: Batch, groups: Groups", "batch: Batch, groups: Groups"))
    edit(packages["config"], ("@attrs.frozen(kw_only=True)\n", ""), file="config.py")
    edit(packages["config"], ("(PluginSection)", ""), file="config.py")
    edit(
        packages["manifest"],
        ('    scope = "group"', '    aliases = ("other",)\n    scope = "group"'),
    )
    edit(packages["nothing"], ("class AcmeNothing(", "class AcmeSomething("))
    edit(packages["formula"], ("total = -(", "total = -2 * ("))
    edit(packages["crash"], ("        scores_N =", CRASH + "        scores_N ="))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--disable-pip-version-check", "--no-compile"]
    wheels = [
        wheel
        for package in packages.values()
        for wheel in WheelBuilder(str(package)).build(
            directory=str(home / "wheels"), versions=["standard"]
        )
    ]
    subprocess.run([*command, "--target", str(home / "site"), *wheels], check=True)
    return home / "site"


@pytest.fixture
def index(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plugin index that finds these distributions."""
    monkeypatch.syspath_prepend(str(site))
    default_index.cache_clear()
    yield default_index()
    default_index.cache_clear()


@pytest.fixture
def checked(index: Any) -> Callable[..., dict[str, Any]]:
    """A function that checks a plugin of one distribution, and returns the report."""

    def run(name: str, *overrides: str, kind: str = "advantage", **options: Any) -> dict[str, Any]:
        entry = index.find(kind, f"acme_{name}")
        [report] = check_plugins([entry], overrides, **options)
        json.dumps(report)
        return report

    return run
