"""Little distributions, built as wheels and installed: good ones, and every way of being bad."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

TRACKER = """
from dovetail.interfaces import Tracker

class {cls}(Tracker):
    name = "{name}"
    api = ">=1.0,<2"

    def metrics_logged(self, step, metrics):
        pass
"""

GOOD_CONFIG = '''
import attrs
from dovetail.sections import PluginSection

@attrs.frozen(kw_only=True)
class MeanConfig(PluginSection):
    """How far below the mean."""

    shift: float = 0.5
    """Subtracted from every advantage."""
'''

GOOD = """
import numpy as np
from dovetail.interfaces import AdvantageEstimator, Advantages
from acme_good.config import MeanConfig

class Mean(AdvantageEstimator):
    name = "acme_mean"
    aliases = ("acme",)
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    scope = "group"
    level = "sample"
    Config = MeanConfig

    def estimate(self, columns, groups):
        scores_N = columns["scores"]
        return Advantages(advantages=scores_N - scores_N.mean() - self.config.shift)
"""

HOOKS = """
from dovetail.hooks import hookimpl

class Recorder:
    seen = []

    @hookimpl
    def step_finished(self, step, metrics):
        self.seen.append((step, metrics))

class Failing:
    @hookimpl
    def step_finished(self, step):
        raise OSError(f"no room for step {step}")
"""

CLI = """
import click

@click.command()
def greet():
    click.echo("hello from acme")
"""

PLUGIN = {
    "aliases": [],
    "api": ">=1.0,<2",
    "capabilities": [],
    "requires": [],
    "provides": [],
    "columns": [],
    "config": "dovetail.sections:PluginSection",
    "config_schema": {"doc": "", "fields": []},
    "needs": [],
}


def plugin(kind: str, name: str, target: str, **more: object) -> dict[str, object]:
    """An entry of a manifest."""
    return {**PLUGIN, "kind": kind, "name": name, "target": target, **more}


def write_project(
    folder: Path,
    distribution: str,
    files: Mapping[str, str],
    entry_points: Mapping[str, Mapping[str, str]],
    plugins: list[dict[str, object]] | None,
    *,
    version: str = "1.0.0",
    extra: str = "",
) -> Path:
    """Write the source folder of a distribution; `plugins` None leaves the manifest out."""
    package = distribution.replace("-", "_")
    source = folder / distribution / "src" / package
    source.mkdir(parents=True)
    for name, text in {"__init__.py": "", **files}.items():
        (source / name).write_text(text)
    if plugins is not None:
        manifest = {"schema": 1, "distribution": distribution, "plugins": plugins}
        (source / "dovetail-plugin.json").write_text(json.dumps(manifest))
    lines = [
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"',
        f'[project]\nname = "{distribution}"\nversion = "{version}"\n{extra}',
    ]
    for group, entries in entry_points.items():
        lines.append(f'[project.entry-points."{group}"]')
        lines += [f'{name} = "{target}"' for name, target in entries.items()]
    lines.append(f'[tool.hatch.build.targets.wheel]\npackages = ["src/{package}"]')
    (folder / distribution / "pyproject.toml").write_text("\n".join(lines) + "\n")
    return folder / distribution


def build(project: Path, wheels: Path, *, editable: bool = False) -> Path:
    """Build a project with hatchling and return the wheel."""
    versions = ["editable" if editable else "standard"]
    [wheel] = WheelBuilder(str(project)).build(directory=str(wheels), versions=versions)
    return Path(wheel)


def install(wheels: list[Path], target: Path) -> None:
    """Install wheels into a folder."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--disable-pip-version-check", "--no-compile", "--ignore-requires-python"]
    subprocess.run([*command, "--target", str(target), *map(str, wheels)], check=True)


def tracker_project(
    folder: Path, distribution: str, name: str, source: str, **more: object
) -> Path:
    """A distribution with one tracker of class `T` in `plugin.py`."""
    target = f"{distribution.replace('-', '_')}.plugin:T"
    given = more.pop("manifest", plugin("tracker", name, target, **more.pop("says", {})))
    return write_project(
        folder,
        distribution,
        {"plugin.py": source},
        {"dovetail.tracker": {name: target}},
        [given] if given else None,
        **more,
    )


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of the little distributions installed from wheels."""
    folder = tmp_path_factory.mktemp("sources")

    def tracker(distribution: str, name: str, source: str | None = None, **more: object) -> Path:
        source = source or TRACKER.format(cls="T", name=name)
        return tracker_project(folder, distribution, name, textwrap.dedent(source), **more)

    good = plugin(
        "advantage",
        "acme_mean",
        "acme_good.plugin:Mean",
        aliases=["acme"],
        capabilities=["deterministic"],
        requires=["scores"],
        config="acme_good.config:MeanConfig",
        columns=[
            {
                "name": "acme.level",
                "dtype": "float32",
                "shape": "dense",
                "meaning": "difficulty of the prompt",
                "owner": "acme",
            }
        ],
        config_schema={
            "doc": "How far below the mean.",
            "fields": [
                {
                    "name": "shift",
                    "type": "float",
                    "doc": "Subtracted from every advantage.",
                    "default": 0.5,
                }
            ],
        },
    )
    projects = [
        write_project(
            folder,
            "acme-good",
            {"plugin.py": GOOD, "config.py": GOOD_CONFIG},
            {"dovetail.advantage": {"acme_mean": "acme_good.plugin:Mean"}},
            [good],
            version="1.2.0",
        ),
        tracker("acme-crash", "crash", "raise RuntimeError('the moon is full')"),
        tracker("acme-dies", "dies", "import os\nos._exit(3)"),
        tracker("acme-future", "future", says={"api": ">=2.0,<3"}),
        tracker("acme-python", "snake", extra='requires-python = ">=3.99"'),
        tracker("acme-twin-a", "twin", version="1.0.0"),
        tracker("acme-twin-b", "twin", version="2.5.0"),
        tracker(
            "acme-needy",
            "needy",
            "import acme_engine",
            says={"needs": [["acme-engine>=1.5", "acme-engine-cpu>=1.5"]]},
            extra='[project.optional-dependencies]\nengine = ["acme-engine>=1.5"]\n'
            'engine-cpu = ["acme-engine-cpu>=1.5"]',
        ),
        tracker("acme-lacking", "lacking", "import acme_dependency"),
        tracker("acme-bare", "bare", manifest=False),
        tracker(
            "acme-drifted",
            "drifted",
            manifest=plugin("tracker", "drifted", "acme_drifted.plugin:Old"),
        ),
        tracker("acme-kind", "kindly", manifest=plugin("sampler", "kindly", "acme_kind.plugin:T")),
        tracker(
            "acme-partial",
            "partial",
            "from dovetail.interfaces.tracker import Tracker\n\nclass T(Tracker):\n    name = 'partial'\n    api = '>=1.0,<2'\n",
        ),
        tracker("acme-misnamed", "misnamed", TRACKER.format(cls="T", name="other")),
        tracker("acme-function", "function", "def T(step, metrics):\n    pass\n"),
        tracker("acme-config", "misconfigured", says={"config": "acme_config.config:Missing"}),
        write_project(
            folder,
            "acme-typo",
            {"plugin.py": TRACKER.format(cls="T", name="typo")},
            {"dovetail.trackr": {"typo": "acme_typo.plugin:T"}},
            [plugin("tracker", "typo", "acme_typo.plugin:T")],
        ),
        write_project(
            folder,
            "acme-extras",
            {"hooks.py": HOOKS, "commands.py": CLI},
            {
                "dovetail.hooks": {
                    "a_broken": "acme_extras.nowhere:Observer",
                    "b_failing": "acme_extras.hooks:Failing",
                    "c_recorder": "acme_extras.hooks:Recorder",
                },
                "dovetail.cli": {
                    "greet": "acme_extras.commands:greet",
                    "shatter": "acme_extras.nowhere:command",
                },
            },
            None,
        ),
    ]
    wheels = folder / "wheels"
    target = tmp_path_factory.mktemp("world")
    install([build(project, wheels) for project in projects], target)
    return target


@pytest.fixture
def installed(world: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The world on this process's path, with an index that sees it."""
    from dovetail.plugins.index import default_index

    monkeypatch.syspath_prepend(world)
    default_index.cache_clear()
    yield world
    default_index.cache_clear()
    # What was imported from there would be found by a test of what is imported and what is not.
    for name in [name for name in sys.modules if name.startswith("acme_")]:
        del sys.modules[name]
